// The largest logit of each row, for callers that ask for it. The maximum that the softmax keeps is
// not it: that one stays until scores exceed it by far (core/softmax.h).
#pragma once

#include "core/softmax.h"
#include "core/warp_lanes.h"

namespace flash {

// Bits that compare as ints as the floats do, negative ones included, and back.
FLASH_HD int sortable_bits(float x) {
  int const bits = ordered_bits(x);
  return bits ^ (bits >> 31 & INT32_MAX);
}
FLASH_HD float from_sortable_bits(int bits) {
  return from_ordered_bits(bits ^ (bits >> 31 & INT32_MAX));
}

// A row's largest logit, from its largest score in the units that the softmax gets. Rows that saw
// no key have none. NaN, which no maximum sees, makes the row's LSE NaN, but so does an infinite
// score.
template <int kRows>
FLASH_HD float largest_logit(OnlineSoftmax<kRows> const& softmax, int r, float top, float scale,
                             float lse) {
  float const logit = softmax.saw_key(r) ? top * scale : -INFINITY;
  return lse != lse && logit < INFINITY ? NAN : logit;
}

// Makes *logit at least x, in one instruction whose result no thread waits for, in any order of
// threads. Bits of floats that are not negative have the order of ints; those of negative ones that
// of unsigned numbers backwards, behind all others. NAN is larger than all.
__device__ inline void raise_logit(float* logit, float x) {
  int const bits = ordered_bits(x);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(logit), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned*>(logit), static_cast<unsigned>(bits));
  }
}

// The same for the largest of a warp's rows. Each lane has one row, as sortable_bits.
__device__ inline void raise_logit_of_warp(float* logit, int bits) {
  int const most = __reduce_max_sync(WarpLanes::kAll, bits);
  if (WarpLanes{}.index() == 0) {
    raise_logit(logit, from_sortable_bits(most));
  }
}

// The same where a warp's rows are of several heads: each head gets the largest of its rows.
__device__ inline void raise_logits_of_warp(float* logits, int head, int bits) {
  unsigned const same = __match_any_sync(WarpLanes::kAll, head);
  int const most = __reduce_max_sync(same, bits);
  if (WarpLanes{}.index() == __ffs(static_cast<int>(same)) - 1) {
    raise_logit(logits + head, from_sortable_bits(most));
  }
}

}  // namespace flash
