// K and V from global to shared memory, ahead of the products.
#pragma once

#include "sm80/copy_tile.h"
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
      load<Config::kHeadDim>(block.k, p.k.row_stride, smem.k.data(), key_block, p.head_dim);
    }
    cp_async_fence();
  }

  __device__ void load_v(int key_block) const {
    load<Config::kHeadDimV>(block.v, p.v.row_stride, smem.v.data(), key_block, p.head_dim_v);
    cp_async_fence();
  }

  // What was loaded last has arrived, and everybody is done with the other buffer.
  __device__ void wait() const {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  template <int kColumns>
  __device__ void load(typename Config::Element const* sequence, int64_t row_stride,
                       typename Config::Element* target, int key_block, int columns) const {
    int const first = key_block * Config::kBlockN;
    load_tile<Config::kBlockN, kColumns, Config::kThreads>(
        sequence + first * row_stride, row_stride, target, block.info.seqlen_k - first, columns,
        threadIdx.x);
  }
};

}  // namespace flash::sm80
