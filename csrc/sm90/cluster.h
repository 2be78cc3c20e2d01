// Copies between the shared memory of a cluster's CTAs. Tests put a header of the same name before
// this one.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/pipeline.h"

namespace flash::sm90 {

// Starts a copy of `bytes`, a multiple of 16, from this CTA's shared memory to `to` in CTA `rank`'s
// of the cluster, where the bytes count towards `full`. `to` and `full` are given as
// addresses in this CTA. One thread calls it; a copy sees what ordinary stores wrote only after a
// fence.
__device__ inline void copy_to_block(uint32_t rank, void const* from, void* to, uint32_t bytes,
                                     Barrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), rank)),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes),
      "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&full), rank))
      : "memory");
}

// Numbers of a thread in the shared memory of CTA `rank`, which it stores four by four, kStride
// entries apart; their bytes count towards `full`. Addresses are those in this CTA.
struct BlockStores {
  uint32_t to;
  uint32_t full;

  __device__ BlockStores(uint32_t rank, float4* to_, Barrier& full_)
      : to(cute::set_block_rank(cute::cast_smem_ptr_to_uint(to_), rank)),
        full(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&full_), rank)) {}

  template <int kOffset>
  __device__ void store(float a, float b, float c, float d) const {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0 + %6], "
        "{%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(full), "n"(kOffset * sizeof(float4))
        : "memory");
  }
};

}  // namespace flash::sm90
