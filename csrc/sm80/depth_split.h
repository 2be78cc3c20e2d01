// Depth splits: warps that have the same rows and columns of a product, and some of its depth each.
// Their sums meet in shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace flash::sm80 {

// A thread's depth split, and its index among the threads of that one, which have all rows and
// columns. Config: with kDepthSplits and kThreadsOfSplit.
template <class Config>
struct SplitThread {
  int split = 0;
  int thread = threadIdx.x;

  __device__ SplitThread() {
    if constexpr (Config::kDepthSplits > 1) {
      split = thread / Config::kThreadsOfSplit;
      thread %= Config::kThreadsOfSplit;
    }
  }
};

// Sums of each depth split, kSize numbers of a thread. Each tells its own before a barrier, and
// adds the others' after it. Two then have the same bits, because a + b is b + a.
template <class Config, int kSize, int kDepthSplits = Config::kDepthSplits>
struct DepthSums {
  static constexpr int kFour = 4;
  float4 fours[kDepthSplits][kSize / kFour][Config::kThreadsOfSplit];

  // begin: of the numbers that these are
  template <class Accumulator>
  __device__ void tell(SplitThread<Config> const& own, Accumulator const& sum, int begin = 0) {
#pragma unroll
    for (int i = 0; i < cute::size(sum); i += kFour) {
      fours[own.split][(begin + i) / kFour][own.thread] = {sum(i), sum(i + 1), sum(i + 2),
                                                           sum(i + 3)};
    }
  }

  template <class Accumulator>
  __device__ void add_others(SplitThread<Config> const& own, Accumulator& sum,
                             int begin = 0) const {
#pragma unroll
    for (int other = 1; other < kDepthSplits; ++other) {
#pragma unroll
      for (int i = 0; i < cute::size(sum); i += kFour) {
        float4 const x = fours[(own.split + other) % kDepthSplits][(begin + i) / kFour][own.thread];
        sum(i) += x.x;
        sum(i + 1) += x.y;
        sum(i + 2) += x.z;
        sum(i + 3) += x.w;
      }
    }
  }
};

// One alone has the whole sum.
template <class Config, int kSize>
struct DepthSums<Config, kSize, 1> {};

}  // namespace flash::sm80
