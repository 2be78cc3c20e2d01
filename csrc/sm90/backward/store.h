// dK, dV, and dQ where one block of keys has all of it, from registers to global memory.
#pragma once

#include "sm90/backward/key_block.h"
#include "sm90/store_rows.h"

namespace flash::sm90 {

template <class Accumulator>
__device__ __forceinline__ void scale(Accumulator& sum, float factor) {
#pragma unroll
  for (int i = 0; i < size(sum); ++i) {
    sum(i) *= factor;
  }
}

// A warpgroup's sums over all rows, both over 1 / (1 - dropout_p), dK over softmax_scale too.
template <class Config>
struct KeyGradients {
  template <class Mma, int kColumns>
  using Fragment =
      decltype(partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));

  Fragment<typename Config::MmaKeys, Config::kHeadDim> dk;
  Fragment<typename Config::MmaValues, Config::kHeadDimV> dv;

  __device__ KeyGradients() {
    clear(dk);
    clear(dv);
  }
};

// Writes what is wanted of dK [keys, head_dim] and dV [keys, head_dim_v], for all keys that exist.
template <class Config>
__device__ __forceinline__ void store_key_gradients(BwdParams const& p,
                                                    KeyBlock<Config> const& block, int warpgroup,
                                                    int thread, KeyGradients<Config>& sum) {
  using Element = typename Config::Element;
  float const keep_scale = 1.f / (1.f - p.scores.dropout_p);
  int const first = warpgroup * kWarpgroupRows, keys = block.slots - first;
  int64_t const key = block.row_k + first;
  if (p.dk.ptr) {
    scale(sum.dk, p.scores.softmax_scale * keep_scale);
    store_rows<Element>(
        sum.dk,
        static_cast<Element*>(p.dk.ptr) + p.dk.offset(block.tile.batch, key, block.tile.head),
        p.dk.row_stride, {keys, p.head_dim}, thread);
  }
  if (p.dv.ptr) {
    scale(sum.dv, keep_scale);
    store_rows<Element>(
        sum.dv,
        static_cast<Element*>(p.dv.ptr) + p.dv.offset(block.tile.batch, key, block.tile.head),
        p.dv.row_stride, {keys, p.head_dim_v}, thread);
  }
}

}  // namespace flash::sm90
