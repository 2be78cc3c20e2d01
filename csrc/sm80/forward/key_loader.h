// Loads K and V from global to shared memory, ahead of the products. Keys in pages are gathered row
// by row, and some of their pages may not exist.
#pragma once

#include "core/fragment_coord.h"
#include "sm80/copy_tile.h"
#include "sm80/forward/row_block.h"

namespace flash::sm80 {

// load_tile with a page looked up for every row. head: first row of the tensor, at the KV head.
template <int kRows, int kColumns, int kThreads, class Element>
__device__ void load_paged_tile(Element const* head, TensorView<const void> const& view,
                                KeyPages const& pages, int position, Element* smem, int rows_left,
                                int columns, int thread_index) {
  using Thread = TileThread<kColumns, kThreads>;
  Thread const thread(thread_index);
  constexpr SmemTile<kRows, kColumns> layout;
  smem += layout(thread.row, thread.col);
#pragma unroll
  for (int pass = 0; pass < kRows / Thread::kRowsPerPass; ++pass) {
    int const row = thread.row + pass * Thread::kRowsPerPass;
    PageSlot const slot =
        row < rows_left ? pages.slot(position + row) : PageSlot{PageSlot::kNoPage, 0};
    bool const exists = pages.exists(slot);
    Element const* const gmem = head + view.offset(slot.page, slot.row, 0) + thread.col;
#pragma unroll
    for (int run = 0; run < kColumns; run += kRun<kColumns>) {
      using CopyOp = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
      auto* target = reinterpret_cast<uint128_t*>(smem + Thread::distance(layout, pass, run));
      CopyOp::copy(*reinterpret_cast<uint128_t const*>(gmem + run), *target,
                   exists && thread.col + run < columns);
    }
  }
}

// All threads call it once per row block: if a page is missing, every KV block runs mask code. A
// test in every step would cost row blocks that have all their pages.
template <class Config>
__device__ void find_missing_pages(RowBlock<Config>& block) {
  KeyPages const& pages = block.pages;
  int const begin = block.info.leftpad + block.range.begin * Config::kBlockN;
  int const end = block.info.leftpad + min(block.range.end * Config::kBlockN, block.info.seqlen_k);
  bool missing = false;
  if (begin < end) {
    int const last = pages.page_size.quotient(end - 1);
    for (int entry = pages.page_size.quotient(begin) + threadIdx.x; entry <= last;
         entry += Config::kThreads) {
      missing |= !pages.exists({pages.page(entry), 0});
    }
  }
  missing = __syncthreads_or(missing);
  if (missing && threadIdx.x == 0) {
    block.pages_missing = true;
    block.range.left = block.range.right = block.range.begin;
  }
  __syncthreads();
}

// Keys of pages that do not exist get -inf.
template <class Config, class Scores>
__device__ void hide_missing(Scores& s, RowBlock<Config> const& block, int key_begin,
                             FragmentCoord<Config::kRowWarps> coord) {
#pragma unroll
  for (int c = 0; c < size<1>(s); ++c) {
    int const key = block.info.leftpad + key_begin + coord.col(c);
    if (!block.pages.exists(block.pages.slot(key))) {
#pragma unroll
      for (int r = 0; r < size<0>(s); ++r) {
        s(r, c) = -INFINITY;
      }
    }
  }
}

// K and V have one buffer each: V is loaded under Q·Kᵀ, the next K under softmax and P·V. A second
// pair saves a barrier per step and was no faster (d 128: 354 against 372 TFLOP/s at 4k keys on an
// H200).
template <class Config>
struct KeyLoader {
  RowBlock<Config> const& block;
  FwdParams const& p;
  SharedStorage<Config>& smem;

  __device__ void load_k(int key_block) const {
    if (key_block != BlockRange::kNone) {
      load<Config::kHeadDim>(block.k, p.k, smem.k.data(), key_block, p.head_dim);
    }
    cp_async_fence();
  }

  __device__ void load_v(int key_block) const {
    load<Config::kHeadDimV>(block.v, p.v, smem.v.data(), key_block, p.head_dim_v);
    cp_async_fence();
  }

  // Waits until what was loaded last has arrived, and all threads are done with the other buffer.
  __device__ void wait() const {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  template <int kColumns>
  __device__ void load(typename Config::Element const* sequence, TensorView<const void> const& view,
                       typename Config::Element* target, int key_block, int columns) const {
    int const first = key_block * Config::kBlockN;
    int const rows_left = block.info.seqlen_k - first;
    if constexpr (Config::kPaged) {
      load_paged_tile<Config::kBlockN, kColumns, Config::kThreads>(
          sequence, view, block.pages, block.info.leftpad + first, target, rows_left, columns,
          threadIdx.x);
    } else {
      load_tile<Config::kBlockN, kColumns, Config::kThreads>(sequence + first * view.row_stride,
                                                             view.row_stride, target, rows_left,
                                                             columns, threadIdx.x);
    }
  }
};

}  // namespace flash::sm80
