// Copies tiles [rows, columns] of 16-bit elements between global and shared memory.
#pragma once

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// A thread's place in a tile: one 16-byte chunk of every run of columns, in every kRowsPerPass-th
// row.
template <int kColumns, int kThreads>
struct TileThread {
  static constexpr int kChunk = 8;  // elements
  static constexpr int kChunksPerRow = kRun<kColumns> / kChunk;
  static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
  int row;
  int col;

  __device__ explicit TileThread(unsigned thread)
      : row(thread / kChunksPerRow), col(thread % kChunksPerRow * kChunk) {}

  // Distance from a thread's first chunk to the one in row `pass`, columns `run`: a constant,
  // because the swizzle repeats every 8 rows. It is spelled out because the compiler does not find
  // it.
  template <class SmemLayout>
  __device__ static constexpr int distance(SmemLayout layout, int pass, int run) {
    static_assert(kRowsPerPass % 8 == 0);
    return layout(pass * kRowsPerPass, run);
  }
};

// Fills shared memory (kRows, kColumns) with rows [0, rows_left) and columns [0, columns) of global
// memory, asynchronously; anything beyond them becomes zero, whatever lies there.
template <int kRows, int kColumns, int kThreads, class Element>
__device__ void load_tile(Element const* gmem, int64_t row_stride, Element* smem, int rows_left,
                          int columns, int thread_index) {
  using Thread = TileThread<kColumns, kThreads>;
  static_assert(sizeof(Element) == 2 && kRows % Thread::kRowsPerPass == 0);
  // Opaque to the optimiser, which would otherwise keep a thread's rows and columns across the loop
  // over keys, in local memory: a few instructions compute them anew.
  asm volatile("" : "+r"(thread_index));
  Thread const thread(thread_index);
  constexpr SmemTile<kRows, kColumns> layout;
  gmem += thread.row * row_stride + thread.col;
  smem += layout(thread.row, thread.col);
#pragma unroll
  for (int pass = 0; pass < kRows / Thread::kRowsPerPass; ++pass) {
    // Opaque to the optimiser, which would otherwise keep one pointer per pass alive across the
    // loop over keys: 32 registers and more, and spills.
    asm volatile("" : "+l"(gmem));
    int const row = thread.row + pass * Thread::kRowsPerPass;
#pragma unroll
    for (int run = 0; run < kColumns; run += kRun<kColumns>) {
      bool const exists = row < rows_left && thread.col + run < columns;
      using CopyOp = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
      auto const* source = reinterpret_cast<uint128_t const*>(gmem + run);
      auto* target = reinterpret_cast<uint128_t*>(smem + Thread::distance(layout, pass, run));
      CopyOp::copy(*source, *target, exists);
    }
    gmem += Thread::kRowsPerPass * row_stride;
  }
}

// Copies a tile from shared to global memory, for the rows and columns that exist.
template <int kRows, int kColumns, int kThreads, class Element>
__device__ void store_tile(Element* gmem, int64_t row_stride, Element const* smem, int rows_left,
                           int columns, int thread_index) {
  using Thread = TileThread<kColumns, kThreads>;
  Thread const thread(thread_index);
  constexpr SmemTile<kRows, kColumns> layout;
  gmem += thread.row * row_stride + thread.col;
  smem += layout(thread.row, thread.col);
#pragma unroll
  for (int pass = 0; pass < kRows / Thread::kRowsPerPass; ++pass) {
    int const row = thread.row + pass * Thread::kRowsPerPass;
#pragma unroll
    for (int run = 0; run < kColumns; run += kRun<kColumns>) {
      if (row < rows_left && thread.col + run < columns) {
        *reinterpret_cast<uint128_t*>(gmem + run) =
            *reinterpret_cast<uint128_t const*>(smem + Thread::distance(layout, pass, run));
      }
    }
    gmem += Thread::kRowsPerPass * row_stride;
  }
}

}  // namespace flash::sm80
