// The chunks of a segment for a walk that makes their factors itself, in shared memory: Q, K, gates
// and V come one chunk ahead.
#pragma once

#include "sm80/linear/vector_stream.h"

namespace flash::sm80::linear {

template <class C, bool kWithOutputs>
class OwnFactors {
  using Tiles = typename C::Element[C::kHeads][C::kChunk * C::kV];

 public:
  struct Storage {
    VectorFactors<C> factors[C::kHeads];
    VectorFactorsStorage<C> making;
    alignas(16) Tiles v[2];
  };
  // What a walk reads of a chunk.
  struct Stage {
    Storage const& storage;
    Tiles const& v;

    __device__ VectorFactors<C> const& factors(int head) const { return storage.factors[head]; }
    __device__ VectorKeys<C> const& keys(int head) const { return storage.factors[head].keys; }
    __device__ typename C::Element const* values(int head) const { return v[head]; }
  };
  int const chunks;

  __device__ OwnFactors(Walk<C> const& walk, VectorParams const& p, Storage& storage)
      : chunks(walk.segment.exists() ? walk.chunks() : 0),
        walk_(walk),
        p_(p),
        storage_(storage),
        rows_(walk, p),
        values_(tiles_of_v(walk)) {}

  __device__ void begin() { load(); }
  // Makes the next chunk's factors, while what the one after it is made of is under way.
  __device__ Stage next() {
    cp_async_wait<0>();
    __syncthreads();
    int const slot = C::of_warp(made_ % 2);
    ++made_;
    load();
    ChunkOfVectors<C> const chunk{p_,
                                  walk_,
                                  storage_.making,
                                  storage_.making.rows[slot],
                                  storage_.factors,
                                  /*keys_only=*/!kWithOutputs};
    chunk.set_rows(own_);
    if constexpr (kWithOutputs) {
      __syncthreads();
      chunk.set_weights();
    }
    C::let_products_see_writes();
    __syncthreads();
    return {storage_, storage_.v[slot]};
  }

 private:
  Walk<C> const& walk_;
  VectorParams const& p_;
  Storage& storage_;
  FactorRows<C> rows_;
  WalkTiles<C, C::kV> values_;
  Own<C> const own_;
  int made_ = 0;  // chunks

  __device__ void load() {
    if (made_ < chunks) {
      values_.load(walk_.chunk_in_order(made_).count, storage_.v[made_ % 2]);
      rows_.load(storage_.making.rows[made_ % 2], kWithOutputs);
    }
  }
};

template <class C, bool kWithOutputs>
using StreamOf =
    std::conditional_t<C::kOwnFactors, OwnFactors<C, kWithOutputs>, VectorStream<C, kWithOutputs>>;

}  // namespace flash::sm80::linear
