// The family's tensor-core instruction, and tiles in shared memory that feed it.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

namespace flash::sm80 {

using namespace cute;

template <class Element>
using MmaInstruction =
    std::conditional_t<std::is_same_v<Element, half_t>, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                       MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;

// Warps in a grid over an accumulator tile; each owns 16 rows of every 16 * kRowWarps, and 16
// neighbouring columns of every 16 * kColumnWarps, because one ldmatrix.x4 feeds two instructions
// of 8 columns. Stacked along the rows alone, whatever is reduced over a row stays within four
// lanes.
template <class Element_, int kRowWarps_, int kColumnWarps_ = 1>
struct WarpGrid {
  using Element = Element_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kColumnWarps = kColumnWarps_;

  // Where a thread's warp begins.
  __device__ static int row(int thread) {
    return 16 * (kColumnWarps == 1 ? thread / 32 : thread / 32 % kRowWarps);
  }
  __device__ static int column(int thread) {
    return kColumnWarps == 1 ? 0 : 16 * (thread / 32 / kRowWarps);
  }
};

// Where element (r, c) of a thread's accumulators, seen as (rows, columns), sits in the grid's
// tile.
template <class Grid>
struct GridCoord {
  int row0;
  int col0;

  __device__ explicit GridCoord(int thread)
      : row0(Grid::row(thread) + thread % 32 / 4), col0(Grid::column(thread) + thread % 4 * 2) {}

  __device__ int row(int r) const { return row0 + r % 2 * 8 + r / 2 * 16 * Grid::kRowWarps; }
  __device__ int col(int c) const {
    return col0 + c % 2 + c / 2 % 2 * 8 + c / 4 * 16 * Grid::kColumnWarps;
  }
};

// A thread's accumulators of a (kM, kN) tile: ((2 columns, 2 rows 8 apart), 16s of rows, 8s of
// columns).
template <class Grid, int kM, int kN>
__device__ auto accumulators() {
  static_assert(kM % (16 * Grid::kRowWarps) == 0 && kN % (16 * Grid::kColumnWarps) == 0);
  return make_tensor<float>(Layout<Shape<Shape<_2, _2>, Int<kM / (16 * Grid::kRowWarps)>,
                                         Int<kN / (8 * Grid::kColumnWarps)>>>{});
}

template <class Grid, int kM, int kN>
__device__ auto zeros() {
  Tensor c = accumulators<Grid, kM, kN>();
  clear(c);
  return c;
}

// A tile's columns lie in runs of 64, or of 32 or 16 where more do not divide them.
template <int kColumns>
constexpr int kRun = kColumns % 64 == 0   ? 64
                     : kColumns % 32 == 0 ? 32
                                          : 16;

// 16-byte chunks of a run XORed with the row: free of bank conflicts for cp.async (rows) and
// ldmatrix (columns of chunks). Eight rows of 64 bytes are four lines of all banks, so there the
// row's lowest bit picks the half of a line and the next two take part in the XOR; of rows of 32
// bytes two bits pick the quarter, and the third takes part.
template <int kColumns>
using SmemAtom = decltype(composition(
    Swizzle<kRun<kColumns> == 64 ? 3 : kRun<kColumns> / 16, 3, 3>{},
    Layout<Shape<_8, Int<kRun<kColumns>>>, Stride<Int<kRun<kColumns>>, _1>>{}));

// (kRows, kColumns), 16-bit elements
template <int kRows, int kColumns>
using SmemTile = decltype(tile_to_shape(SmemAtom<kColumns>{}, Shape<Int<kRows>, Int<kColumns>>{}));

// mma.m16n8k16 leaves a thread with 2 neighbouring columns in each of 2 rows, 8 apart:
// ((2 cols, 2 rows), MMA_M, MMA_N) seen as (rows, cols) = ((2, MMA_M), (2, MMA_N)).
template <class Layout>
CUTE_HOST_DEVICE auto rows_and_columns(Layout const& accumulator) {
  return make_layout(make_layout(get<0, 1>(accumulator), get<1>(accumulator)),
                     make_layout(get<0, 0>(accumulator), get<2>(accumulator)));
}

// The same registers as the A operand of the next product, whose k runs over these columns:
// two eights of columns make one 16-deep operand, ((2, 2), M, N) → ((2, 2, 2), M, N / 2).
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
