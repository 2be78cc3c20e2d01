// Loads keys, and Q, dO and the rows' statistics, from global to shared memory, ahead of the
// products.
#pragma once

#include "sm80/backward/key_block.h"
#include "sm80/copy_tile.h"

namespace flash::sm80 {

template <class Config>
struct RowLoader {
  KeyBlock<Config> const& block;
  BwdParams const& p;
  SharedStorage<Config>& smem;

  __device__ void load_keys() const {
    load_tile<Config::kBlockN, Config::kHeadDim, Config::kThreads>(
        block.k, p.k.row_stride, smem.k.data(), block.keys, p.head_dim, threadIdx.x);
    load_tile<Config::kBlockN, Config::kHeadDimV, Config::kThreads>(
        block.v, p.v.row_stride, smem.v.data(), block.keys, p.head_dim_v, threadIdx.x);
  }

  __device__ void load_rows(RowIteration at, int stage) const {
    int const row = at.m_block * Config::kBlockM, rows_left = block.info.seqlen_q - row;
    load_tile<Config::kBlockM, Config::kHeadDim, Config::kThreads>(
        block.q + at.head * p.q.head_stride + row * p.q.row_stride, p.q.row_stride,
        smem.q[stage].data(), rows_left, p.head_dim, threadIdx.x);
    load_tile<Config::kBlockM, Config::kHeadDimV, Config::kThreads>(
        block.dout + at.head * p.dout.head_stride + row * p.dout.row_stride, p.dout.row_stride,
        smem.dout[stage].data(), rows_left, p.head_dim_v, threadIdx.x);
    load_stats(at, stage);
    cp_async_fence();
  }

  // Waits until what was loaded last has arrived, and all threads are done with all other buffers.
  __device__ void wait() const {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  __device__ void load_stats(RowIteration at, int stage) const {
    constexpr int kChunks = sizeof(RowStats<Config::kBlockM>) / sizeof(uint128_t);
    static_assert(kChunks <= Config::kThreads);
    if (threadIdx.x < kChunks) {
      auto const* source = reinterpret_cast<uint128_t const*>(
          p.workspace.stats + block.index(at) * (2 * Config::kBlockM));
      auto* target = reinterpret_cast<uint128_t*>(&smem.stats[stage]);
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(source[threadIdx.x], target[threadIdx.x],
                                                       true);
    }
  }
};

}  // namespace flash::sm80
