// Queries as operands of the products with codes: in fp16, and in the codes' order of columns.
#pragma once

#include "core/softmax.h"
#include "core/swap_halves.h"
#include "decode/codes.h"

namespace flash::decode {

// A row is multiplied by a power of two that brings its largest number to [2^14, 2^15): all numbers
// of bf16 that matter beside it are exact in fp16 then. Scores are multiplied by the inverse.
struct RowFactor {
  float factor = 1.f;
  float inverse = 1.f;

  // A row of zeros, of infinities or of NaN stays as it is.
  __device__ explicit RowFactor(float largest) {
    constexpr int kBias = 127, kFirst = 23, kTop = 14;
    int const exponent = bits_ordered_from_zero(largest) >> kFirst;
    if (exponent > 0 && exponent < 255) {
      // 2^(kTop - exponent), as far as it has an inverse
      int const bits = min(kTop + 2 * kBias - exponent, 2 * kBias - 1);
      factor = from_bits_ordered_from_zero(bits << kFirst);
      inverse = from_bits_ordered_from_zero((2 * kBias - bits) << kFirst);
    }
  }
};

// Turns bf16 rows [16, kColumns] in shared memory, kStride apart, into fp16 rows times their
// factors, and stores the factors' inverses. Called by all threads, between barriers.
template <int kThreads, int kColumns, int kStride>
__device__ void convert_queries(bfloat16_t* tile, float (&inverse_factors)[16]) {
  constexpr int kOfRow = kThreads / 16, kChunk = 8;
  static_assert(kThreads % 32 == 0 && kOfRow <= 32);
  using From = cutlass::AlignedArray<bfloat16_t, kChunk>;
  using To = cutlass::AlignedArray<half_t, kChunk>;
  int const row = static_cast<int>(threadIdx.x) / kOfRow;
  int const first = static_cast<int>(threadIdx.x) % kOfRow * kChunk;
  bfloat16_t* const numbers = tile + row * kStride;
  float largest = 0.f;
#pragma unroll 1
  for (int col = first; col < kColumns; col += kOfRow * kChunk) {
    From const chunk = *reinterpret_cast<From const*>(numbers + col);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      largest = fmaxf(largest, fabsf(static_cast<float>(chunk[i])));
    }
  }
#pragma unroll
  for (int lanes = kOfRow / 2; lanes > 0; lanes /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  }
  RowFactor const scale(largest);
  if (first == 0) {
    inverse_factors[row] = scale.inverse;
  }
#pragma unroll 1
  for (int col = first; col < kColumns; col += kOfRow * kChunk) {
    From const chunk = *reinterpret_cast<From const*>(numbers + col);
    To converted;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      converted[i] = half_t(static_cast<float>(chunk[i]) * scale.factor);
    }
    *reinterpret_cast<To*>(numbers + col) = converted;
  }
}

// Q (16, columns) as operands: of each 16 columns a lane has four neighbours of two rows, in the
// order of numbers_of. words: (4 registers, 1, steps).
template <int kStride, class Words>
__device__ void read_queries_for_codes(half_t const* tile, int lane, Words&& words) {
  half_t const* const first = tile + lane / 4 * kStride + lane % 4 * 4;
#pragma unroll
  for (int step = 0; step < size<2>(words); ++step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint2 four = *reinterpret_cast<uint2 const*>(first + r * 8 * kStride + step * 16);
      if constexpr (!kConvertsCodes) {
        swap_halves(four.x, four.y);
      }
      words(r, 0, step) = four.x;
      words(r + 2, 0, step) = four.y;
    }
  }
}

}  // namespace flash::decode
