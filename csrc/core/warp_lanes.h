#pragma once

#include <cstdint>

namespace flash {

// The lanes of a warp as the threads that search together in core/split_schedule.h.
struct WarpLanes {
  static constexpr int kCount = 32;
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ int index() const { return threadIdx.x % kCount; }

  __device__ int64_t sum(int64_t x) const {
#pragma unroll
    for (int distance = kCount / 2; distance > 0; distance /= 2) {
      x += __shfl_xor_sync(kAll, x, distance);
    }
    return x;
  }

  // Of this lane and those below it.
  __device__ int running_sum(int x) const {
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2) {
      int const below = __shfl_up_sync(kAll, x, distance);
      x += index() >= distance ? below : 0;
    }
    return x;
  }

  // The lowest lane with the condition, or kCount.
  __device__ int first(bool condition) const {
    unsigned const lanes = __ballot_sync(kAll, condition);
    return lanes ? __ffs(static_cast<int>(lanes)) - 1 : kCount;
  }

  __device__ int of(int lane, int x) const { return __shfl_sync(kAll, x, lane); }
};

}  // namespace flash
