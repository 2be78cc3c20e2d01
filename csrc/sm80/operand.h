// Operands of mma.m16n8k16 from tiles in shared memory, 16 x 16 elements an ldmatrix.x4.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// How an operand lies in shared memory: its depth runs along the rows of memory, or across them.
// Named by the instruction that reads it.
using Along = SM75_U32x4_LDSM_N;
using Across = SM75_U16x8_LDSM_T;

// Which 16 bytes a lane points ldmatrix.x4 at: a row, and one of two neighbouring chunks of it.
struct LanePlace {
  int row;
  int chunk;
};

// A stored as (16 rows, 16 deep).
__device__ inline LanePlace lanes_of_a(int thread) { return {thread % 16, thread % 32 / 16}; }

// A stored as (16 deep, 16 rows), by ldmatrix.trans.
__device__ inline LanePlace lanes_of_a_transposed(int thread) {
  return {thread % 32 / 16 * 8 + thread % 8, thread % 16 / 8};
}

// B stored as (16 columns, 16 deep): two operands of 8 columns.
__device__ inline LanePlace lanes_of_b(int thread) { return lanes_of_a_transposed(thread); }

// B stored as (16 deep, 16 columns): the same two operands by ldmatrix.trans.
__device__ inline LanePlace lanes_of_b_transposed(int thread) { return lanes_of_a(thread); }

// One side of a product over a grid of warps, in a SmemTile<kRows, kColumns> from (row, col) on, as
// this thread reads it. One 32-bit offset serves all 16 x 16 squares: rows differ by constants,
// columns of one run by the XOR with a constant, because the swizzle is itself an XOR. Left to
// CuTe, the compiler keeps 19 addresses alive in the loop over keys, and spills; and it takes ten
// times as long.
template <class Way, class Element, int kRows, int kColumns>
struct SmemOperand {
  static constexpr bool kAlong = std::is_same_v<Way, Along>;
  static constexpr int kRowBytes = kRun<kColumns> * sizeof(Element);

  Element const* tile;
  int row;  // both multiples of 16 and known to the compiler
  int col;
  int first;  // bytes

  // `lane`: of the warp; `begin`: the warp's first row (of A) or column (of B).
  __device__ SmemOperand(Element const* tile_, LanePlace lane, int begin, int row_, int col_)
      : tile(tile_), row(row_), col(col_) {
    SmemTile<kRows, kColumns> const layout;
    first = sizeof(Element) * (kAlong ? layout(lane.row + begin, lane.chunk * 8)
                                      : layout(lane.row, lane.chunk * 8 + begin));
  }

  // The square of 16 rows of A, or columns of B, from i on, and 16 deep from k on.
  __device__ void read(int i, int k, uint32_t* registers) const {
    int const r = row + (kAlong ? i : k), c = col + (kAlong ? k : i);
    int const run = c / kRun<kColumns>, in_run = c % kRun<kColumns>;
    int const offset = (first ^ (in_run * int(sizeof(Element)))) + (run * kRows + r) * kRowBytes;
    auto const* source = reinterpret_cast<char const*>(tile) + offset;
    Way::copy(*reinterpret_cast<uint128_t const*>(source), registers[0], registers[1], registers[2],
              registers[3]);
  }
};

template <class Grid, class Way, int kRows, int kColumns>
__device__ auto operand_a(typename Grid::Element const* tile, int thread, int row = 0,
                          int col = 0) {
  using Operand = SmemOperand<Way, typename Grid::Element, kRows, kColumns>;
  return Operand(tile, Operand::kAlong ? lanes_of_a(thread) : lanes_of_a_transposed(thread),
                 Grid::row(thread), row, col);
}

template <class Grid, class Way, int kRows, int kColumns>
__device__ auto operand_b(typename Grid::Element const* tile, int thread, int row = 0,
                          int col = 0) {
  using Operand = SmemOperand<Way, typename Grid::Element, kRows, kColumns>;
  return Operand(tile, Operand::kAlong ? lanes_of_b(thread) : lanes_of_b_transposed(thread),
                 Grid::column(thread), row, col);
}

}  // namespace flash::sm80
