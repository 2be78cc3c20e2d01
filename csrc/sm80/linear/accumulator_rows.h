// Rows of a strip in accumulators: what is added to them, and how they leave.
#pragma once

#include "sm80/linear/config.h"

namespace flash::sm80::linear {

template <int kColumns>
using Rows = float[kColumns / 8][4];

// An operand that meets a state, which is bf16. The 11 bits of fp16 are two numbers of bf16.
template <class Element>
struct AgainstState {
  static constexpr bool kSplits = !std::is_same_v<Element, StateElement>;
  uint32_t nearest[4];
  uint32_t rest[4];

  __device__ explicit AgainstState(uint32_t const (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kSplits) {
        split<StateElement>(unpack<Element>(a[i]), nearest[i], rest[i]);
      } else {
        nearest[i] = a[i];
      }
    }
  }

  __device__ void multiply_by(uint32_t const (&b)[4], float (&left)[4], float (&right)[4]) const {
    multiply<StateElement>(nearest, b, left, right);
    if constexpr (kSplits) {
      multiply<StateElement>(rest, b, left, right);
    }
  }
};

// Multiplies two tokens' numbers, in one register, by what is left of them.
template <class Element>
__device__ uint32_t decayed(uint32_t pair, float2 left) {
  float2 const x = unpack<Element>(pair);
  return pack<Element>(x.x * left.x, x.y * left.y);
}

// sums (16, kColumns) += a square * rows of a tile, from this strip's on.
template <int kColumns, class Element>
__device__ void add_square(uint32_t const (&a)[4], Element const* tile, int strip,
                           Rows<kColumns>& sums) {
#pragma unroll
  for (int n = 0; n < kColumns; n += 16) {
    uint32_t b[4];
    read_b_deep<kColumns>(tile, strip * 16, n, b);
    multiply<Element>(a, b, sums[n / 8], sums[n / 8 + 1]);
  }
}

// The sum over the four lanes that share a row, in all of them.
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The sum over the eight lanes that share a column, in all of them.
__device__ inline float sum_of_column(float x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Two neighbouring numbers of a row, of which `left` exist. whole: they may be written at once.
template <class Out>
__device__ void store_pair(Out* target, int left, bool whole, float first, float second) {
  if (whole && left > 0) {
    if constexpr (std::is_same_v<Out, float>) {
      *reinterpret_cast<float2*>(target) = {first, second};
    } else {
      *reinterpret_cast<uint32_t*>(target) = pack<Out>(first, second);
    }
    return;
  }
  if (left > 0) {
    target[0] = Out(first);
  }
  if (left > 1) {
    target[1] = Out(second);
  }
}

}  // namespace flash::sm80::linear
