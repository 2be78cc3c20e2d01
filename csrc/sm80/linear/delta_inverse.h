// T = (I + A)⁻¹ of a chunk's 64 tokens, A strictly lower triangular, in squares of 16 x 16: those
// on the diagonal row by row, and, column by column, T(i, j) = −T(i, i) Σ A(i, l) T(l, j), l from j
// to i − 1. fp32, but that a factor of a product is two numbers of bf16: 16 bits of it.
#pragma once

#include "sm80/linear/delta_config.h"

namespace flash::sm80::linear {

// A square in shared memory: rows so far apart that the lanes that read pairs of numbers of four
// rows are in different banks.
constexpr int kSquarePitch = 24;
using Square = float[16 * kSquarePitch];

// The inverse of I + a, of a square on the diagonal. A lane has a column.
__device__ inline void invert_diagonal(Square const& a, Square& out) {
  int const column = threadIdx.x % 16;
  float x[16];
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    x[row] = row == column ? 1.f : 0.f;
#pragma unroll
    for (int l = 0; l < row; ++l) {
      x[row] -= a[row * kSquarePitch + l] * x[l];
    }
  }
  if (threadIdx.x % 32 < 16) {
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      out[row * kSquarePitch + column] = x[row];
    }
  }
}

// An operand as the nearest numbers of bf16, and what is missing.
struct FineOperand {
  uint32_t nearest[4];
  uint32_t rest[4];

  __device__ void set(int word, float low, float high) {
    split<cutlass::bfloat16_t>({low, high}, nearest[word], rest[word]);
  }
};

// sums += a b, without the product of the two rests.
__device__ inline void multiply_fine(FineOperand const& a, FineOperand const& b, float (&left)[4],
                                     float (&right)[4]) {
  multiply<cutlass::bfloat16_t>(a.rest, b.nearest, left, right);
  multiply<cutlass::bfloat16_t>(a.nearest, b.rest, left, right);
  multiply<cutlass::bfloat16_t>(a.nearest, b.nearest, left, right);
}

// A square's transpose as the operand A, and as the operand B.
__device__ inline FineOperand transposed_a(Square const& x) {
  int const row = threadIdx.x % 32 / 4, deep = threadIdx.x % 4 * 2;
  FineOperand a;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float const* at = x + (deep + word / 2 * 8) * kSquarePitch + row + word % 2 * 8;
    a.set(word, at[0], at[kSquarePitch]);
  }
  return a;
}
__device__ inline float2 pair_of_b(Square const& x, int word) {
  int const column = threadIdx.x % 32 / 4 + word / 2 * 8, deep = threadIdx.x % 4 * 2 + word % 2 * 8;
  return *reinterpret_cast<float2 const*>(x + column * kSquarePitch + deep);
}
__device__ inline FineOperand transposed_b(Square const& x) {
  FineOperand b;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float2 const pair = pair_of_b(x, word);
    b.set(word, pair.x, pair.y);
  }
  return b;
}

// Accumulators become the square whose transpose they are, negated.
__device__ inline void store_transposed(float const (&left)[4], float const (&right)[4],
                                        Square& out) {
  int const column = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float* const to = out + (row + e % 2) * kSquarePitch + column + e / 2 * 8;
    to[0] = -left[e];
    to[8 * kSquarePitch] = -right[e];
  }
}

// The squares of T below the diagonal of a column, by a warp; those on the diagonal are there.
// Transposes are multiplied, because they are accumulators whose next product takes them as they
// lie: Tᵀ(i, j) = −(Σ Tᵀ(l, j) Aᵀ(i, l)) Tᵀ(i, i).
__device__ inline void invert_column(Square const (&a)[kDeltaSquares],
                                     Square (&inverse)[kDeltaSquares], int column) {
#pragma unroll 1
  for (int i = column + 1; i < kDeltaStrips; ++i) {
    float left[4] = {}, right[4] = {};
#pragma unroll 1
    for (int l = column; l < i; ++l) {
      multiply_fine(transposed_a(inverse[square_of(l, column)]), transposed_b(a[square_of(i, l)]),
                    left, right);
    }
    FineOperand sum;
    sum.set(0, left[0], left[1]);
    sum.set(1, left[2], left[3]);
    sum.set(2, right[0], right[1]);
    sum.set(3, right[2], right[3]);
    float low[4] = {}, high[4] = {};
    multiply_fine(sum, transposed_b(inverse[square_of(i, i)]), low, high);
    store_transposed(low, high, inverse[square_of(i, column)]);
    __syncwarp();
  }
}

}  // namespace flash::sm80::linear
