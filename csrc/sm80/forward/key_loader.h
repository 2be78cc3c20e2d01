// Loads K and V from global to shared memory, ahead of the products.
#pragma once

#include "sm80/copy_tile.h"
#include "sm80/forward/pages.h"
#include "sm80/forward/row_block.h"

namespace flash::sm80 {

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
