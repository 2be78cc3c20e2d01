// Largest logits of rows and heads, for calls that ask for them.
#pragma once

#include "core/early_launch.h"
#include "core/max_logits.h"
#include "sm90/forward/accumulators.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90::forward {

// Keeps the largest score of each row so far; the first ones replace what was there.
template <class Config, bool kFirst>
struct KeepMaxLogits {
  ForwardArgs const& args;
  SharedStorage<Config>& smem;

  __device__ __forceinline__ void operator()(int r, float top) const {
    if (args.params.max_logits.wanted()) {
      if constexpr (kFirst) {
        smem.maximum(r) = bits_in_order(top);
        __syncwarp();
      } else {
        atomicMax(&smem.maximum(r), bits_in_order(top));
      }
    }
  }
};

// Whether the call asks a kernel that keeps them in shared memory. Then every KV block is taken
// into the maxima.
template <class Config>
__device__ __forceinline__ bool wants_max_logits(ForwardArgs const& args) {
  return Config::kMaxLogits == MaxLogitsIn::Shared && args.params.max_logits.wanted();
}

// What OnlineSoftmax::raise calls with each row's largest score.
template <bool kFirst, class Config>
__device__ __forceinline__ decltype(auto) tops_of(ForwardArgs const& args,
                                                  SharedStorage<Config>& smem,
                                                  Accumulators<Config>& acc) {
  if constexpr (Config::kMaxLogits == MaxLogitsIn::Shared) {
    return KeepMaxLogits<Config, kFirst>{args, smem};
  } else {
    return (acc.tops);
  }
}

// What is left to do for the largest logits of a thread's two rows is done once: of the four lanes
// that share the rows, two finish the first and two the second.
struct OwnRow {
  bool second = threadIdx.x % 2;

  template <class T>
  __device__ T of(T const& first_row, T const& second_row) const {
    return second ? second_row : first_row;
  }
};

// The largest score of this lane's own row.
template <class Config>
__device__ __forceinline__ float largest_score_of_row(SharedStorage<Config>& smem,
                                                      Accumulators<Config> const& acc, OwnRow own) {
  if constexpr (Config::kMaxLogits == MaxLogitsIn::Shared) {
    __syncwarp();
    return from_bits_in_order(smem.maximum(own.second));
  } else {
    auto const& [first, second] = acc.tops.top;
    float const top =
        fmaxf(own.of(first, second), __shfl_xor_sync(WarpLanes::kAll, own.of(second, first), 1));
    return fmaxf(top, __shfl_xor_sync(WarpLanes::kAll, top, 2));
  }
}

// Raises the largest logits of the heads that a warp has rows of. head, logit: of this lane's own
// row; the head is counted from the row block's first.
template <class Config>
__device__ __forceinline__ void raise_heads(ForwardArgs const& args, RowBlock<Config> const& block,
                                            int head, float logit) {
  wait_for_launch_before();  // which has made them -inf
  float* const of_heads = args.params.max_logits.of_heads;
  int const bits = bits_in_order(logit);
  if constexpr (Config::kPackGqa) {
    int const heads = static_cast<int>(args.rows.heads.divisor);
    raise_logits_of_warp(of_heads + (block.tile.head * heads + head), heads, head, bits);
  } else {
    raise_logit_of_warp(of_heads + block.tile.head, bits);
  }
}

}  // namespace flash::sm90::forward
