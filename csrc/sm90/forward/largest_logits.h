// Largest logits of rows and heads, for calls that ask for them.
#pragma once

#include "core/launch_order.h"
#include "sm90/forward/accumulators.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90::forward {

// Keeps the largest score of each row so far; the first ones replace what was there.
template <class Config, bool kFirst>
struct LargestLogits {
  ForwardArgs const& args;
  SharedStorage<Config>& smem;

  __device__ __forceinline__ void operator()(int r, float top) const {
    if (args.params.max_logits.wanted()) {
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
  return Config::kLargest == Largest::InShared && args.params.max_logits.wanted();
}

// What OnlineSoftmax::raise calls with each row's largest score.
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

// For kernels that keep none.
struct NoHeadLogits {
  template <class... Ignored>
  __device__ explicit NoHeadLogits(Ignored const&...) {}
};

// The largest logits of a thread's rows on their way to those of their heads.
template <class Config>
struct HeadLogits {
  float* of_heads;  // from the row block's first head on
  int bits;         // of the rows so far, if they are of one head

  __device__ __forceinline__ HeadLogits(ForwardArgs const& args, RowBlock<Config> const& block)
      : of_heads(args.params.max_logits.of_heads), bits(sortable_bits(-INFINITY)) {
    if (of_heads) {
      int const group = Config::kPackGqa ? static_cast<int>(args.rows.heads.divisor) : 1;
      of_heads += block.tile.head * group;
      wait_for_launch_before();  // which has made them -inf
    }
  }

  // head: of those that the row block has.
  __device__ __forceinline__ void add(int head, float logit) {
    if constexpr (Config::kPackGqa) {
      raise_logits_of_warp(of_heads, head, sortable_bits(logit));
    } else {
      bits = max(bits, sortable_bits(logit));
    }
  }

  __device__ __forceinline__ void end() const {
    if (!Config::kPackGqa && of_heads) {
      raise_logit_of_warp(of_heads, bits);
    }
  }
};

}  // namespace flash::sm90::forward
