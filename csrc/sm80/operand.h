// Operands of mma.m16n8k16 from tiles in shared memory, 16 x 16 elements an ldmatrix.x4.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// Which 16 bytes a lane points ldmatrix.x4 at: a row, and one of two neighbouring chunks of it.
struct LanePlace {
  int row;
  int chunk;
};

// A, (16 rows, 16 deep); warps are stacked along the rows.
__device__ inline LanePlace lanes_of_a(int thread) {
  return {thread / 32 * 16 + thread % 16, thread % 32 / 16};
}

// B stored as (16 columns, 16 deep): two operands of 8 columns.
__device__ inline LanePlace lanes_of_b(int thread) {
  return {thread % 32 / 16 * 8 + thread % 8, thread % 16 / 8};
}

// B stored as (16 deep, 16 columns): the same two operands by ldmatrix.trans.
__device__ inline LanePlace lanes_of_b_transposed(int thread) {
  return {thread % 16, thread % 32 / 16};
}

// Reads 16 x 16 squares of a SmemTile<kRows, kColumns>. One 32-bit offset serves all of them: rows
// differ by constants, columns of one run by the XOR with a constant, because the swizzle is itself
// an XOR. Left to CuTe, the compiler keeps 19 addresses alive in the loop over keys, and spills.
template <class Element, int kRows, int kColumns>
struct OperandReader {
  static constexpr int kBytes = sizeof(Element);
  static constexpr int kRowBytes = kRun<kColumns> * kBytes;
  Element const* tile;
  int first;  // bytes

  __device__ OperandReader(Element const* tile_, LanePlace lane)
      : tile(tile_), first(kBytes * SmemTile<kRows, kColumns>{}(lane.row, lane.chunk * 8)) {}

  // The square at (row, col), both multiples of 16 and known to the compiler.
  template <class Instruction>
  __device__ void read(int row, int col, uint32_t* registers) const {
    int const run = col / kRun<kColumns>, in_run = col % kRun<kColumns>;
    int const offset = (first ^ (in_run * kBytes)) + (run * kRows + row) * kRowBytes;
    auto const* source = reinterpret_cast<char const*>(tile) + offset;
    Instruction::copy(*reinterpret_cast<uint128_t const*>(source), registers[0], registers[1],
                      registers[2], registers[3]);
  }
};

}  // namespace flash::sm80
