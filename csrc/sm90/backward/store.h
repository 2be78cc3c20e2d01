// Stores dK and dV from registers to global memory, to their rows or to sums.
#pragma once

#include "sm90/backward/key_block.h"
#include "sm90/store_rows.h"

namespace flash::sm90::backward {

template <class Accumulator>
__device__ __forceinline__ void scale(Accumulator& sum, float factor) {
#pragma unroll
  for (int i = 0; i < size(sum); ++i) {
    sum(i) *= factor;
  }
}

// A warpgroup's sums over all rows; both gradients are 1 / (1 - dropout_p) times these, and dK
// softmax_scale times that.
template <class Config>
struct KeyGradients {
  template <class Mma, int kColumns>
  using Fragment =
      decltype(partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));

  Fragment<typename Config::MmaKeys, Config::kHeadDim> dk;
  Fragment<typename Config::MmaValues, Config::kHeadDimV> dv;

  // In a stream of tiles the first iteration's products overwrite the sums.
  __device__ KeyGradients() {
    if constexpr (!Config::kStreamsTiles) {
      begin();
    }
  }
  __device__ void begin() {
    clear(dk);
    clear(dv);
  }
};

// Where the gradient of the keys or values goes: to its rows, or to the sums of a GQA split or row
// part.
struct KeyRows {
  TensorView<void> const& rows;
  TensorView<float> const& sums;
  int columns;
  float factor;    // of what the accumulators hold
  int column = 0;  // the first

  // The same from another column on.
  __device__ KeyRows from(int first) const { return {rows, sums, columns, factor, first}; }
};

__device__ inline KeyRows rows_of_dk(BwdParams const& p) {
  return {p.dk, p.workspace.dk, p.head_dim, p.scores.softmax_scale / (1.f - p.scores.dropout_p)};
}
// unit: of the probabilities
__device__ inline KeyRows rows_of_dv(BwdParams const& p, float unit = 1.f) {
  return {p.dv, p.workspace.dv, p.head_dim_v, 1.f / (1.f - p.scores.dropout_p) * (1.f / unit)};
}

// For plain scores, without a division.
__device__ inline KeyRows plain_rows_of_dk(BwdParams const& p) {
  return {p.dk, p.workspace.dk, p.head_dim, p.scores.softmax_scale};
}
__device__ inline KeyRows plain_rows_of_dv(BwdParams const& p) {
  return {p.dv, p.workspace.dv, p.head_dim_v, 1.f};
}

// Stores a gradient of a warpgroup's 64 keys, from the block's `first` on, as far as they exist and
// if it is wanted. The two branches have nothing in common: with one multiplication for both, ptxas
// spills in the main loop.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_key_rows(KeyRows const& to, KeyBlock<Config> const& block,
                                               int first, int thread, Accumulator& sum) {
  using Element = typename Config::Element;
  WorkTile const& tile = block.tile;
  int64_t const key = block.row_k + first;
  Extent const extent{block.slots - first, to.columns - to.column};
  if (block.has_sums() && to.sums.ptr) {
    scale(sum, to.factor);
    store_sums(sum, to.sums.ptr + block.sum_offset(to.sums, first) + to.column,
               block.sum_stride(to.sums), extent.rows, thread);
  } else if (to.rows.ptr) {
    scale(sum, to.factor);
    Element* const rows =
        static_cast<Element*>(to.rows.ptr) + to.rows.offset(tile.batch, key, tile.head) + to.column;
    if constexpr (Config::kWideKeyRows) {
      store_wide_rows<Element>(sum, rows, to.rows.row_stride, extent, thread);
    } else {
      store_rows<Element>(sum, rows, to.rows.row_stride, extent, thread);
    }
  }
}

}  // namespace flash::sm90::backward
