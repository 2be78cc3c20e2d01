// What the thread blocks of a cluster show each other in shared memory. Code for GPUs before Hopper
// has none of it. The tests put a header of the same name before this one.
#pragma once

#include <cstdint>

namespace flash {

// Until all threads of the cluster are here, and what they wrote can be read. Also before a block
// ends that others may read: its shared memory ends with it.
__device__ inline void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();  // both instructions are a whole warp's
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// Shared memory of the cluster's block `rank`, as addresses of this block's are there.
class ClusterBlock {
 public:
  __device__ explicit ClusterBlock(int rank) : rank_(rank) {}

  __device__ float read(float const& here) const {
    float x = 0.f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there(&here)) : "memory");
#endif
    return x;
  }

  __device__ float4 read(float4 const& here) const {
    float4 x{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(there(&here))
                 : "memory");
#endif
    return x;
  }

 private:
  __device__ uint32_t there([[maybe_unused]] void const* here) const {
    uint32_t address = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(here))), "r"(rank_));
#endif
    return address;
  }

  int rank_;
};

}  // namespace flash
