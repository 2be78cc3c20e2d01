// Products whose depth is shared by parts of a CTA's warps: each part has all rows and columns, and
// some of the depth. Their sums meet in shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace flash::sm80 {

// A thread's part, and its index among the threads of that part. Config: with kParts and
// kThreadsOfPart.
template <class Config>
struct PartThread {
  int part = 0;
  int thread = threadIdx.x;

  __device__ PartThread() {
    if constexpr (Config::kParts > 1) {
      part = thread / Config::kThreadsOfPart;
      thread %= Config::kThreadsOfPart;
    }
  }
};

// Sums of each part, kSize numbers of a thread. Each part tells its own before a barrier, and adds
// the others' behind it. Two parts then have the same bits, because a + b is b + a.
template <class Config, int kSize, int kParts = Config::kParts>
struct PartSums {
  static constexpr int kFour = 4;
  float4 fours[kParts][kSize / kFour][Config::kThreadsOfPart];

  // begin: of the numbers that these are
  template <class Accumulator>
  __device__ void tell(PartThread<Config> const& own, Accumulator const& sum, int begin = 0) {
#pragma unroll
    for (int i = 0; i < cute::size(sum); i += kFour) {
      fours[own.part][(begin + i) / kFour][own.thread] = {sum(i), sum(i + 1), sum(i + 2),
                                                          sum(i + 3)};
    }
  }

  template <class Accumulator>
  __device__ void add_others(PartThread<Config> const& own, Accumulator& sum, int begin = 0) const {
#pragma unroll
    for (int other = 1; other < kParts; ++other) {
#pragma unroll
      for (int i = 0; i < cute::size(sum); i += kFour) {
        float4 const x = fours[(own.part + other) % kParts][(begin + i) / kFour][own.thread];
        sum(i) += x.x;
        sum(i + 1) += x.y;
        sum(i + 2) += x.z;
        sum(i + 3) += x.w;
      }
    }
  }
};

// One part has the whole sum.
template <class Config, int kSize>
struct PartSums<Config, kSize, 1> {};

}  // namespace flash::sm80
