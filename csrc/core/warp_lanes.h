#pragma once

#include <cstdint>

namespace flash {

// The lanes of a warp as the threads that search together in core/piece_schedule.h.
struct WarpLanes {
  static constexpr int kCount = 32;
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ int index() const { return threadIdx.x % kCount; }

  // The sum of numbers in [0, 2^53) in two halves, each a single instruction, where 64 bits would
  // take ten shuffles one after the other.
  __device__ int64_t sum(int64_t x) const {
    constexpr int kBits = 27;  // 32 of them make 32
    unsigned const low = __reduce_add_sync(kAll, unsigned(x) & ((1u << kBits) - 1));
    unsigned const high = __reduce_add_sync(kAll, unsigned(x >> kBits));
    return (int64_t(high) << kBits) + low;
  }

  // The sum over this lane and the lanes below it.
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
