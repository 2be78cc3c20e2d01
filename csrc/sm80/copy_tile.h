// Tiles [rows, head_dim] between global and shared memory.
#pragma once

#include "core/block_info.h"
#include "sm80/config.h"

namespace flash::sm80 {

// A thread's place in a tile: one 16-byte chunk of every 64 columns, in every kRowsPerPass-th row.
template <class Config>
struct TileThread {
  int row;
  int col;

  __device__ explicit TileThread(int thread)
      : row(thread / Config::kChunksPerRow), col(thread % Config::kChunksPerRow * Config::kChunk) {}

  // From a thread's first chunk to the one in row `pass`, columns `run`: a constant, because the
  // swizzle repeats every 8 rows. Spelled out since the compiler does not find it.
  template <class SmemLayout>
  __device__ static constexpr int distance(SmemLayout layout, int pass, int run) {
    static_assert(Config::kRowsPerPass % 8 == 0);
    return layout(pass * Config::kRowsPerPass, run);
  }
};

// Fills shared memory (kRows, head_dim) with rows [0, rows_left) of global memory, asynchronously;
// rows and columns beyond what exists become zero, whatever lies there.
template <class Config, int kRows, class SmemLayout>
__device__ void load_tile(typename Config::Element const* gmem, int64_t row_stride,
                          typename Config::Element* smem, SmemLayout, int rows_left, int head_dim,
                          TileThread<Config> thread) {
  gmem += thread.row * row_stride + thread.col;
  constexpr SmemLayout layout;
  smem += layout(thread.row, thread.col);
#pragma unroll
  for (int pass = 0; pass < kRows / Config::kRowsPerPass; ++pass) {
    // Opaque to the optimiser, which would otherwise keep one pointer per pass alive across the
    // loop over keys: 32 registers and more, and spills.
    asm volatile("" : "+l"(gmem));
    int const row = thread.row + pass * Config::kRowsPerPass;
#pragma unroll
    for (int run = 0; run < Config::kHeadDim; run += 64) {
      bool const exists = row < rows_left && thread.col + run < head_dim;
      using CopyOp = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
      auto const* source = reinterpret_cast<uint128_t const*>(gmem + run);
      auto* target = reinterpret_cast<uint128_t*>(smem + thread.distance(layout, pass, run));
      CopyOp::copy(*source, *target, exists);
    }
    gmem += Config::kRowsPerPass * row_stride;
  }
}

// The way back, for the rows and columns that exist.
template <class Config, int kRows, class SmemLayout>
__device__ void store_tile(typename Config::Element* gmem, int64_t row_stride,
                           typename Config::Element const* smem, SmemLayout, int rows_left,
                           int head_dim, TileThread<Config> thread) {
  gmem += thread.row * row_stride + thread.col;
  constexpr SmemLayout layout;
  smem += layout(thread.row, thread.col);
#pragma unroll
  for (int pass = 0; pass < kRows / Config::kRowsPerPass; ++pass) {
    int const row = thread.row + pass * Config::kRowsPerPass;
#pragma unroll
    for (int run = 0; run < Config::kHeadDim; run += 64) {
      if (row < rows_left && thread.col + run < head_dim) {
        *reinterpret_cast<uint128_t*>(gmem + run) =
            *reinterpret_cast<uint128_t const*>(smem + thread.distance(layout, pass, run));
      }
    }
    gmem += Config::kRowsPerPass * row_stride;
  }
}

}  // namespace flash::sm80
