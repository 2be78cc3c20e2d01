// Stores dK and dV: sums in registers, to shared and then to global memory.
#pragma once

#include "sm80/backward/key_block.h"
#include "sm80/copy_tile.h"
#include "sm80/products.h"
#include "sm80/store_accumulators.h"

namespace flash::sm80 {

// A thread's part of the sums over all rows; both gradients are 1 / (1 - dropout_p) times these,
// and dK softmax_scale times that.
template <class Config>
struct KeyGradients {
  using Grid = typename Config::KeyGrid;
  decltype(zeros<Grid, Config::kBlockN, Config::kHeadDim>()) dk =
      zeros<Grid, Config::kBlockN, Config::kHeadDim>();
  decltype(zeros<Grid, Config::kBlockN, Config::kHeadDimV>()) dv =
      zeros<Grid, Config::kBlockN, Config::kHeadDimV>();
};

template <class Grid, int kRows, int kColumns, class Accumulator>
__device__ void scale_to_smem(Accumulator& sum, float scale, typename Grid::Element* target) {
#pragma unroll
  for (int i = 0; i < size(sum); ++i) {
    sum(i) *= scale;
  }
  store_accumulators<Grid, kRows, kColumns>(convert<typename Grid::Element>(sum), target,
                                            threadIdx.x);
}

// Writes what a GQA split has of dK or dV, times `factor`, to the split's sums.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_part_sums(TensorView<float> const& to,
                                                KeyBlock<Config> const& block, float factor,
                                                Accumulator const& sum_mma) {
  if (!to.ptr) {
    return;
  }
  GridCoord<typename Config::KeyGrid> const coord(threadIdx.x);
  Tensor sum = make_tensor(sum_mma.data(), rows_and_columns(sum_mma.layout()));
  float* const rows =
      to.ptr + to.offset(block.tile.batch, block.info.row_k + block.key_begin, block.tile.head);
#pragma unroll
  for (int r = 0; r < size<0>(sum); ++r) {
    if (coord.row(r) >= block.slots) {
      continue;
    }
    float* const row = rows + coord.row(r) * to.row_stride;
#pragma unroll
    for (int c = 0; c < size<1>(sum); c += 2) {
      *reinterpret_cast<float2*>(row + coord.col(c)) =
          float2{sum(r, c) * factor, sum(r, c + 1) * factor};
    }
  }
}

// Writes what is wanted of dK [keys, head_dim] and dV [keys, head_dim_v], for all keys that exist,
// at a point where no thread reads K and V in shared memory any more.
template <class Config>
__device__ void store_key_gradients(BwdParams const& p, KeyBlock<Config> const& block,
                                    SharedStorage<Config>& smem, KeyGradients<Config>& sum) {
  using Grid = typename Config::KeyGrid;
  using Element = typename Config::Element;
  float const keep_scale = 1.f / (1.f - p.scores.dropout_p);
  float const dk_scale = p.scores.softmax_scale * keep_scale;
  if (p.gqa.splits > 1) {
    store_part_sums(p.workspace.dk, block, dk_scale, sum.dk);
    store_part_sums(p.workspace.dv, block, keep_scale, sum.dv);
    return;
  }
  scale_to_smem<Grid, Config::kBlockN, Config::kHeadDim>(sum.dk, dk_scale, smem.k.data());
  scale_to_smem<Grid, Config::kBlockN, Config::kHeadDimV>(sum.dv, keep_scale, smem.v.data());
  __syncthreads();
  int64_t const key = block.info.row_k + block.key_begin;
  if (p.dk.ptr) {
    Element* const dk = static_cast<Element*>(p.dk.ptr);
    store_tile<Config::kBlockN, Config::kHeadDim, Config::kThreads>(
        dk + p.dk.offset(block.tile.batch, key, block.tile.head), p.dk.row_stride, smem.k.data(),
        block.slots, p.head_dim, threadIdx.x);
  }
  if (p.dv.ptr) {
    Element* const dv = static_cast<Element*>(p.dv.ptr);
    store_tile<Config::kBlockN, Config::kHeadDimV, Config::kThreads>(
        dv + p.dv.offset(block.tile.batch, key, block.tile.head), p.dv.row_stride, smem.v.data(),
        block.slots, p.head_dim_v, threadIdx.x);
  }
}

}  // namespace flash::sm80
