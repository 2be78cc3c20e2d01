// Where the numbers of a tensor-core accumulator sit in their tile. mma.m16n8k16 and wgmma agree: a
// warp holds 16 rows; a lane has, in rows lane / 4 and lane / 4 + 8, two neighbouring columns of
// every eight.
#pragma once

namespace flash {

// Row and column, inside the tile, of element (r, c) of a thread's accumulator seen as (rows,
// columns); kWarps warps are stacked along the rows.
template <int kWarps>
struct FragmentCoord {
  int row0;
  int col0;

  __device__ explicit FragmentCoord(int thread)
      : row0(thread / 32 * 16 + thread % 32 / 4), col0(thread % 4 * 2) {}

  __device__ int row(int r) const { return row0 + r % 2 * 8 + r / 2 * 16 * kWarps; }
  __device__ int col(int c) const { return col0 + col_offset(c); }
  __device__ static constexpr int col_offset(int c) { return c % 2 + c / 2 * 8; }
};

// The four lanes that share a row.
struct QuadReduce {
  template <class Op>
  __device__ float operator()(float x, Op op) const {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  }
};

// Calls `body` in all lanes of a warp if one of them asks for it. This is a loop, though it runs
// once at most: ptxas turns an `if` into predicated instructions, which issue whether or not they
// do anything (d 128: 132 of 930 in the loop over keys), and then lacks registers.
template <class Body>
__device__ void if_any_in_warp(bool asks, Body body) {
  int times = __any_sync(0xffffffffu, asks);
#pragma unroll 1
  while (times) {
    asm volatile("" : "+r"(times));  // unknown to the optimiser from here on
    body();
    --times;
  }
}

}  // namespace flash
