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

}  // namespace flash::sm80
