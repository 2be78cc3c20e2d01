// Stands in for csrc/sm90/cluster.h.
#pragma once

#include "hopper/block_copies.h"
#include "sm90/pipeline.h"

namespace flash::sm90 {

inline void copy_to_block(uint32_t rank, void const* from, void* to, uint32_t bytes,
                          Barrier& full) {
  simt::block_copies().start(rank, from, to, bytes, &full);
}

struct BlockStores {
  uint32_t rank;
  float4* to;
  Barrier* full;

  BlockStores(uint32_t rank_, float4* to_, Barrier& full_) : rank(rank_), to(to_), full(&full_) {}

  template <int kOffset>
  void store(float a, float b, float c, float d) const {
    simt::block_copies().start(rank, float4{a, b, c, d}, to + kOffset, full);
  }
};

}  // namespace flash::sm90
