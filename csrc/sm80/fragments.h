// Views of tensor-core accumulators.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// mma.m16n8k16 leaves a thread with 2 neighbouring columns in each of 2 rows, 8 apart:
// ((2 cols, 2 rows), MMA_M, MMA_N) seen as (rows, cols) = ((2, MMA_M), (2, MMA_N)).
template <class Layout>
CUTE_HOST_DEVICE auto rows_and_columns(Layout const& accumulator) {
  return make_layout(make_layout(get<0, 1>(accumulator), get<1>(accumulator)),
                     make_layout(get<0, 0>(accumulator), get<2>(accumulator)));
}

// The same registers as the A operand of the next product, whose k runs over these columns:
// two 8-wide column groups make one 16-deep operand, ((2, 2), M, N) → ((2, 2, 2), M, N / 2).
template <class Layout>
CUTE_HOST_DEVICE auto as_operand_a(Layout const& accumulator) {
  auto const split = logical_divide(accumulator, Shape<Underscore, Underscore, _2>{});
  return make_layout(make_layout(get<0, 0>(split), get<0, 1>(split), get<2, 0>(split)),
                     get<1>(split), get<2, 1>(split));
}

template <class To, class Engine, class Layout>
__device__ auto convert(Tensor<Engine, Layout> const& from) {
  constexpr int kSize = decltype(size(from))::value;
  using From = typename Engine::value_type;
  cutlass::NumericArrayConverter<To, From, kSize> converter;
  auto const converted =
      converter(*reinterpret_cast<cutlass::Array<From, kSize> const*>(from.data()));
  Tensor to = make_tensor<To>(from.layout());
  *reinterpret_cast<cutlass::Array<To, kSize>*>(to.data()) = converted;
  return to;
}

// Row and column, inside the tile, of element (r, c) of a thread's rows_and_columns view.
template <int kWarps>
struct FragmentCoord {
  int row0;
  int col0;

  __device__ explicit FragmentCoord(int thread)
      : row0(thread / 32 * 16 + thread % 32 / 4), col0(thread % 4 * 2) {}

  __device__ int row(int r) const { return row0 + r % 2 * 8 + r / 2 * 16 * kWarps; }
  __device__ int col(int c) const { return col0 + c % 2 + c / 2 * 8; }
};

// The four lanes that share a row.
struct QuadReduce {
  template <class Op>
  __device__ float operator()(float x, Op op) const {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  }
};

}  // namespace flash::sm80
