// Barriers and writes into shared memory between the CTAs of a cluster. On GPUs before Hopper they
// do nothing. The tests put a header of the same name before this one.
#pragma once

#include <cstdint>

namespace flash {

// Waits until all threads of the cluster are here, and what they wrote, in any CTA's memory, can be
// read. A CTA that others write to needs this before it ends, too: its shared memory ends with it.
__device__ inline void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();  // both instructions are a whole warp's
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// A barrier in two halves, which only says that every CTA has begun and its shared memory is there:
// it orders nothing that was written before. Between the halves a thread may do anything but arrive
// again.
__device__ inline void announce_to_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Shared memory of the cluster's CTA `rank`, addressed by what lies at the same place in this CTA.
class ClusterBlock {
 public:
  __device__ explicit ClusterBlock(int rank) : rank_(rank) {}

  __device__ void write(float& here, float x) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there(&here)), "f"(x) : "memory");
#endif
  }

  __device__ void write(float2& here, float2 x) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there(&here)), "f"(x.x), "f"(x.y)
                 : "memory");
#endif
  }

  __device__ void write(float4& here, float4 x) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there(&here)), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
#endif
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
