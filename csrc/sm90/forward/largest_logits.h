// Rows' largest logits, for calls that ask for them.
#pragma once

#include "sm90/forward/accumulators.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90::forward {

// Keeps the largest score of each row so far; the first ones replace what was there.
template <class Config, bool kFirst>
struct LargestLogits {
  ForwardArgs const& args;
  SharedStorage<Config>& smem;

  __device__ __forceinline__ void operator()(int r, float top) const {
    if (args.params.lse.to_max != 0) {
      if constexpr (kFirst) {
        smem.maximum(r) = sortable_bits(top);
        __syncwarp();
      } else {
        atomicMax(&smem.maximum(r), sortable_bits(top));
      }
    }
  }
};

// Whether the call asks a kernel that keeps them in shared memory. Then every KV block is taken
// into the maxima.
template <class Config>
__device__ __forceinline__ bool wants_largest(ForwardArgs const& args) {
  return Config::kLargest == Largest::InShared && args.params.lse.to_max != 0;
}

// What OnlineSoftmax::raise tells.
template <bool kFirst, class Config>
__device__ __forceinline__ decltype(auto) tops_of(ForwardArgs const& args,
                                                  SharedStorage<Config>& smem,
                                                  Accumulators<Config>& acc) {
  if constexpr (Config::kLargest == Largest::InShared) {
    return LargestLogits<Config, kFirst>{args, smem};
  } else {
    return (acc.tops);
  }
}

// A row's largest score, in all threads of the row.
template <class Config>
__device__ __forceinline__ float largest_score_of_row(SharedStorage<Config>& smem,
                                                      Accumulators<Config> const& acc, int r) {
  if constexpr (Config::kLargest == Largest::InShared) {
    __syncwarp();
    return from_sortable_bits(smem.maximum(r));
  } else {
    return QuadReduce{}(acc.tops.top[r], Max{});
  }
}

}  // namespace flash::sm90::forward
