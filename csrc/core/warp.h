#pragma once

#include <array>

#include "params/common.h"

namespace flash {

// One int per lane of a warp, and the collective steps that the varlen tile search is made of. In a
// kernel a lane holds its own value and steps are shuffles; on the host all 32 values lie in an
// array, so that the search itself is one piece of code and can be tested there.
class WarpInts {
 public:
  static constexpr int lanes = 32;

#if defined(__CUDA_ARCH__)
  // Every lane of the warp has to arrive here, as at each step below.
  template <class Function>
  static __device__ __forceinline__ WarpInts make(Function of_lane) {
    return WarpInts{of_lane(lane_id())};
  }

  __device__ __forceinline__ WarpInts inclusive_sum() const {
    int sum = value_;
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2) {
      int const lower = __shfl_up_sync(0xffffffffu, sum, distance);
      sum += lane_id() >= distance ? lower : 0;
    }
    return WarpInts{sum};
  }

  __device__ __forceinline__ int count_at_most(int limit) const {
    return __popc(__ballot_sync(0xffffffffu, value_ <= limit));
  }

  __device__ __forceinline__ int at(int lane) const {
    return __shfl_sync(0xffffffffu, value_, lane);
  }

 private:
  // Not threadIdx.x % 32: right for blocks of any shape.
  static __device__ __forceinline__ int lane_id() {
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  __device__ __forceinline__ explicit WarpInts(int value) : value_(value) {}

  int value_;
#else
  template <class Function>
  FLASH_HD static WarpInts make(Function of_lane) {
    WarpInts result;
    for (int lane = 0; lane < lanes; ++lane) result.values_[lane] = of_lane(lane);
    return result;
  }

  FLASH_HD WarpInts inclusive_sum() const {
    WarpInts result = *this;
    for (int lane = 1; lane < lanes; ++lane) result.values_[lane] += result.values_[lane - 1];
    return result;
  }

  FLASH_HD int count_at_most(int limit) const {
    int count = 0;
    for (int lane = 0; lane < lanes; ++lane) count += values_[lane] <= limit;
    return count;
  }

  FLASH_HD int at(int lane) const { return values_[lane]; }

 private:
  std::array<int, lanes> values_;
#endif
};

}  // namespace flash
