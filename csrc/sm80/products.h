// Matrix products of a grid of warps: C += A·Bᵀ with B in shared memory, A there or in registers.
// The loops are unrolled whole, so the compiler reads operands as far ahead as registers allow;
// doing it by hand gained nothing.
#pragma once

#include "sm80/operand.h"

namespace flash::sm80 {

// kTiles operands of kWords registers each, read two (B) or one (A) at a time.
template <class Element, int kWords, int kTiles>
struct Operands {
  uint32_t words[kTiles][kWords];

  // (2 * kWords elements, kTiles), as gemm takes them
  __device__ auto tensor() {
    return make_tensor(reinterpret_cast<Element*>(words),
                       Layout<Shape<Int<2 * kWords>, Int<kTiles>>>{});
  }
};

// c (M, N) += a (M, 16) · b (N, 16)ᵀ at depth k, a in registers: (MMA, MMA_M).
template <class Grid, class A, class B, class C>
__device__ __forceinline__ void multiply_step(A const& a, B const& b, int k, C& c) {
  constexpr int kTiles = decltype(size<2>(c))::value;
  Operands<typename Grid::Element, 2, kTiles> columns;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    b.read(n / 2 * 16 * Grid::kColumnWarps, k, columns.words[n]);
  }
  gemm(MmaInstruction<typename Grid::Element>{}, a, columns.tensor(), c);
}

// c (M, N) += a (M, kDepth) · b (N, kDepth)ᵀ
template <class Grid, int kDepth, class A, class B, class C>
__device__ __forceinline__ void multiply(A const& a, B const& b, C& c) {
  constexpr int kTiles = decltype(size<1>(c))::value;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    Operands<typename Grid::Element, 4, kTiles> rows;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      a.read(m * 16 * Grid::kRowWarps, k, rows.words[m]);
    }
    multiply_step<Grid>(rows.tensor(), b, k, c);
  }
}

// The same with a already in operand registers (MMA, MMA_M, depth / 16).
template <class Grid, class A, class B, class C>
__device__ __forceinline__ void multiply_registers(A const& a, B const& b, C& c) {
#pragma unroll
  for (int step = 0; step < size<2>(a); ++step) {
    multiply_step<Grid>(a(_, _, step), b, step * 16, c);
  }
}

}  // namespace flash::sm80
