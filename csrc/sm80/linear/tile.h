// Tiles of 16-bit elements in shared memory, rows of 16 to 128 columns, and the operands of
// mma.m16n8k16 in them.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>

#include "sm80/operand.h"

namespace flash::sm80::linear {

constexpr int kRunElements = 8;  // of 16 bytes, which a lane moves at a time

// The element at which a run of a row begins. The run is XORed with a number of the row, so that
// eight rows of one column of runs, which ldmatrix reads, are in different banks.
template <int kColumns>
__device__ inline int offset_in_tile(int row, int run) {
  constexpr int kRuns = kColumns / kRunElements;
  static_assert(kRuns >= 2 && (kRuns & (kRuns - 1)) == 0);
  int const xor_of_row = kRuns >= 8 ? row & 7 : (row / (8 / kRuns)) & (kRuns - 1);
  return (row * kRuns + (run ^ xor_of_row)) * kRunElements;
}

// Fills tiles (kRows, kColumns) with the rows and columns that exist, and zeros: one tile after the
// other, of rows that follow each other. A thread has one column of runs, so that its rows are a
// stride apart in both memories: an address for each would stay in registers from call to call.
// kBackwards: each tile's rows come before those of the tile before it.
template <int kRows, int kColumns, int kThreads, class Element, bool kBackwards = false>
class TileStream {
  static constexpr int kRuns = kColumns / kRunElements, kStep = kThreads / kRuns;
  // offset_in_tile repeats after eight rows.
  static_assert(kThreads % kRuns == 0 && kStep % 8 == 0);

  Element const* source_;
  int columns_;  // that exist, of this thread's run

  __device__ static int first() { return threadIdx.x / kRuns; }

 public:
  // gmem: the first row's first column. columns: from there on.
  __device__ TileStream(Element const* gmem, int64_t row_stride, int columns)
      : source_(gmem + first() * row_stride + threadIdx.x % kRuns * kRunElements),
        columns_(columns - int(threadIdx.x % kRuns * kRunElements)) {}

  // The next tile, of which `rows` exist. `aligned`: rows begin at multiples of 16 bytes and are
  // whole runs; they are then copied asynchronously.
  __device__ void load(int64_t row_stride, Element* smem, int rows, bool aligned) {
    Element const* source = source_;
    source_ += (kBackwards ? -kRows : kRows) * row_stride;
    Element* target = smem + offset_in_tile<kColumns>(first(), threadIdx.x % kRuns);
    if (!aligned) {
      load_slowly(source, row_stride, target, rows);
      return;
    }
    int const left = columns_ > 0 ? rows - first() : 0;
    // Fewer rows than threads have some of: the last threads have none.
    constexpr int kPasses = (kRows + kStep - 1) / kStep;
    static_assert(kRows % kStep == 0 || kPasses == 1);
    if (kRows < kStep && first() >= kRows) {
      return;
    }
#pragma unroll 4
    for (int pass = 0; pass < kPasses; ++pass) {
      // Nothing is read of a row that does not exist.
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(source),
                                                       *reinterpret_cast<uint128_t*>(target),
                                                       pass * kStep < left);
      source += kStep * row_stride;
      target += kStep * kColumns;
    }
  }

 private:
  // One at a time: registers are for what the kernel holds meanwhile.
  __device__ void load_slowly(Element const* source, int64_t row_stride, Element* target,
                              int rows) const {
#pragma unroll 1
    for (int row = first(); row < kRows; row += kStep) {
#pragma unroll 1
      for (int e = 0; e < kRunElements; ++e) {
        target[e] = row < rows && e < columns_ ? source[e] : Element(0.f);
      }
      source += kStep * row_stride;
      target += kStep * kColumns;
    }
  }
};

template <int kRows, int kColumns, int kThreads, class Element>
__device__ void load_tile(Element const* gmem, int64_t row_stride, Element* smem, int rows,
                          int columns, bool aligned) {
  TileStream<kRows, kColumns, kThreads, Element>(gmem, row_stride, columns)
      .load(row_stride, smem, rows, aligned);
}

// Writes the rows and columns that exist, by the lanes of a warp.
template <int kRows, int kColumns, class Element>
__device__ void store_strip(Element* gmem, int64_t row_stride, Element const* smem, int rows,
                            int columns, bool aligned) {
  constexpr int kRuns = kColumns / kRunElements;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kRows * kRuns; i += 32) {
    int const row = i / kRuns, column = i % kRuns * kRunElements;
    Element const* source = smem + offset_in_tile<kColumns>(row, i % kRuns);
    Element* target = gmem + row * row_stride + column;
    if (row >= rows) {
      continue;
    }
    if (aligned && column < columns) {
      *reinterpret_cast<uint128_t*>(target) = *reinterpret_cast<uint128_t const*>(source);
    } else {
      for (int e = 0; e < kRunElements && column + e < columns; ++e) {
        target[e] = source[e];
      }
    }
  }
}

// row and column are multiples of 16: a square is a constant and an XOR away from the first one.
template <bool kTransposed, int kColumns, class Element>
__device__ void read_square(Element const* tile, int row, int column, LanePlace lane,
                            uint32_t (&out)[4]) {
  auto const* source = reinterpret_cast<uint128_t const*>(
      tile + row * kColumns + (offset_in_tile<kColumns>(lane.row, lane.chunk) ^ column));
  using Instruction = std::conditional_t<kTransposed, SM75_U16x8_LDSM_T, SM75_U32x4_LDSM_N>;
  Instruction::copy(*source, out[0], out[1], out[2], out[3]);
}

// Squares of 16 x 16 elements at (row, column) of a tile as operands: A, or two B of 8 columns.
// `deep`: the tile's rows are what the product sums over.
template <int kColumns, class Element>
__device__ void read_a(Element const* tile, int row, int column, uint32_t (&a)[4]) {
  read_square<false, kColumns>(tile, row, column, lanes_of_a(threadIdx.x % 32), a);
}
template <int kColumns, class Element>
__device__ void read_a_deep(Element const* tile, int row, int column, uint32_t (&a)[4]) {
  read_square<true, kColumns>(tile, row, column, lanes_of_a_transposed(threadIdx.x % 32), a);
}
template <int kColumns, class Element>
__device__ void read_b(Element const* tile, int row, int column, uint32_t (&b)[4]) {
  read_square<false, kColumns>(tile, row, column, lanes_of_b(threadIdx.x % 32), b);
}
template <int kColumns, class Element>
__device__ void read_b_deep(Element const* tile, int row, int column, uint32_t (&b)[4]) {
  read_square<true, kColumns>(tile, row, column, lanes_of_b_transposed(threadIdx.x % 32), b);
}

template <class Element>
using Instruction =
    std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                       SM80_16x8x16_F32BF16BF16F32_TN>;

// sums (16, 16) += a (16, 16 deep) * b (16 deep, 16); sums as two instructions leave them.
template <class Element>
__device__ void multiply(uint32_t const (&a)[4], uint32_t const (&b)[4], float (&left)[4],
                         float (&right)[4]) {
  Instruction<Element>::fma(left[0], left[1], left[2], left[3], a[0], a[1], a[2], a[3], b[0], b[1],
                            left[0], left[1], left[2], left[3]);
  Instruction<Element>::fma(right[0], right[1], right[2], right[3], a[0], a[1], a[2], a[3], b[2],
                            b[3], right[0], right[1], right[2], right[3]);
}

template <class Element>
__device__ uint32_t pack(float low, float high) {
  cutlass::NumericArrayConverter<Element, float, 2> const converter;
  cutlass::Array<float, 2> const pair{low, high};
  auto const packed = converter(pair);
  return reinterpret_cast<uint32_t const&>(packed);
}

template <class Element>
__device__ float2 unpack(uint32_t word) {
  Element const low = Element::bitcast(static_cast<uint16_t>(word));
  Element const high = Element::bitcast(static_cast<uint16_t>(word >> 16));
  return {static_cast<float>(low), static_cast<float>(high)};
}

// Two numbers as the nearest ones of a dtype, and what is missing.
template <class Element>
__device__ void split(float2 x, uint32_t& nearest, uint32_t& rest) {
  nearest = pack<Element>(x.x, x.y);
  float2 const taken = unpack<Element>(nearest);
  rest = pack<Element>(x.x - taken.x, x.y - taken.y);
}

// Two accumulators of 8 columns as the operand A of the next product, 16 deep.
template <class Element>
__device__ void as_a(float const (&left)[4], float const (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack<Element>(left[0], left[1]);
  a[1] = pack<Element>(left[2], left[3]);
  a[2] = pack<Element>(right[0], right[1]);
  a[3] = pack<Element>(right[2], right[3]);
}

}  // namespace flash::sm80::linear
