// Rows' largest logits, for calls that ask for them.
#pragma once

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

// Whether the call asks. Then every KV block is taken into the maxima.
template <class Config>
__device__ __forceinline__ bool wants_largest(ForwardArgs const& args) {
  return Config::kKeepsLargest && args.params.lse.to_max != 0;
}

// What OnlineSoftmax::raise tells.
template <class Config, bool kFirst>
__device__ __forceinline__ auto largest_logits(ForwardArgs const& args,
                                               SharedStorage<Config>& smem) {
  if constexpr (Config::kKeepsLargest) {
    return LargestLogits<Config, kFirst>{args, smem};
  } else {
    return NoTops{};
  }
}

}  // namespace flash::sm90::forward
