// The largest logit of each row, for callers that ask for it. The maximum that the softmax keeps is
// not it: that one stays until scores exceed it by far (core/softmax.h).
#pragma once

#include <algorithm>

#include "core/softmax.h"
#include "core/warp_lanes.h"

namespace flash {

// Bits that compare as ints as the floats do, negative ones included, and back.
FLASH_HD int bits_in_order(float x) {
  int const bits = bits_ordered_from_zero(x);
  return bits ^ (bits >> 31 & INT32_MAX);
}
FLASH_HD float from_bits_in_order(int bits) {
  return from_bits_ordered_from_zero(bits ^ (bits >> 31 & INT32_MAX));
}

// A row's largest logit, from its largest score in the units that the softmax gets. Rows that saw
// no key have none. NaN, which no maximum sees, makes the row's LSE NaN, but so does an infinite
// score.
FLASH_HD float max_logit(bool saw_key, float top, float scale, float lse) {
  float const logit = saw_key ? top * scale : -INFINITY;
  return lse != lse && logit < INFINITY ? NAN : logit;
}

// Makes *logit at least x, in one instruction whose result no thread waits for, in any order of
// threads. As ints, bits of non-negative floats grow with the float; as unsigned numbers, bits of
// negative ones are larger than those and grow as the float falls. NAN is larger than all.
__device__ inline void raise_logit(float* logit, float x) {
  int const bits = bits_ordered_from_zero(x);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(logit), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned*>(logit), static_cast<unsigned>(bits));
  }
}

// The same for the largest of a warp's rows. Each lane has one row, as bits_in_order.
__device__ inline void raise_logit_of_warp(float* logit, int bits) {
  int const most = __reduce_max_sync(WarpLanes::kAll, bits);
  if (WarpLanes{}.index() == 0) {
    raise_logit(logit, from_bits_in_order(most));
  }
}

// The same for rows of several heads, each with its head's logit: a row of each of `heads`, then
// the next ones. As in a tensor-core accumulator a quad of lanes has two of a warp's 16 rows; here
// even lanes have row lane / 4, odd ones the eighth row after it. bits: of the lane's row.
//
// No lane reads from one that it computes, and none waits for some lanes alone (match and redux for
// the lanes of a head): either way ptxas takes warps of the whole kernel for divergent. Of Hopper's
// forward at d 64 it then keeps no address in uniform registers, and the loop over keys has 547 or
// 556 instructions instead of 531.
__device__ inline void raise_logits_of_warp(float* logit, int heads, int head, int bits) {
  constexpr int kRows = 16;
  if ((heads & (heads - 1)) == 0) {
#pragma unroll
    for (int apart = kRows / 2; apart > 0; apart /= 2) {
      if (heads <= apart) {
        int const lanes_apart = apart == kRows / 2 ? 1 : 4 * apart;
        bits = std::max(bits, __shfl_xor_sync(WarpLanes::kAll, bits, lanes_apart));
      }
    }
  } else if (heads < kRows) {
#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
      int const most =
          __reduce_max_sync(WarpLanes::kAll, head == h ? bits : bits_in_order(-INFINITY));
      bits = head == h ? most : bits;
    }
  }
  // Neighbouring rows are of different heads.
  int const lane = WarpLanes{}.index(), row = lane / 4 + lane % 2 * (kRows / 2);
  if (lane % 4 < 2 && row < heads) {
    raise_logit(logit, from_bits_in_order(bits));
  }
}

}  // namespace flash
