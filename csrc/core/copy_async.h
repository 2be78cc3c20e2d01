#pragma once

#include <cute/arch/copy_sm80.hpp>

namespace flash {

// Keeps the compiler from moving ordinary memory accesses across it: the instructions by which
// CUTLASS waits for asynchronous copies do not declare that they concern memory.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

// Starts to copy 16 bytes to shared memory, or zeros where they do not exist. L2 fetches kFetch
// bytes around them: 128, as CuTe's instruction asks for, or 64.
template <int kFetch>
__device__ void copy_chunk_async(cute::uint128_t const& source, cute::uint128_t& target,
                                 bool exists) {
  static_assert(kFetch == 64 || kFetch == 128);
#if defined(__CUDA_ARCH__)
  if constexpr (kFetch == 64) {
    asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(
                     cute::cast_smem_ptr_to_uint(&target)),
                 "l"(&source), "r"(exists ? 16 : 0));
    return;
  }
#endif
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(source, target, exists);
}

}  // namespace flash
