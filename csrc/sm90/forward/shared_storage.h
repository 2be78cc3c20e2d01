#pragma once

#include "sm90/forward/row_block.h"
#include "sm90/pipeline.h"

namespace flash::sm90::forward {

// O has a buffer of its own, or goes out from registers: none of the others waits for it, and the
// next row block's Q, K and V arrive while the last one is finished.
template <class Config>
struct SharedStorage {
  using Element = typename Config::Element;

  alignas(1024) Element q[Config::kConsumers * Config::kTileQ];
  alignas(1024) Element k[Config::kStages][Config::kTileK];
  alignas(1024) Element v[Config::kStages][Config::kTileV];
  alignas(1024) Element out[Config::kConsumers][Config::kTileO];
  // Of each warpgroup's rows: who is ahead of the others gets the next ones at once. Full also
  // means: the row block is described in `block`.
  Ring<1> q_ring[Config::kConsumers];
  Ring<Config::kStages> k_ring;
  Ring<Config::kStages> v_ring;
  // Of each tile of keys, those that exist (pages.h); for two rounds of the ring, because K's
  // buffer is free before its scores are masked.
  uint32_t exist[2 * Config::kStages][Config::kKeyWords];
  // Four: the next may be described while Q of one is waited for and the one before is computed,
  // and a warp that is late may still be storing the one before that. Who stores late has stored a
  // row block before it frees the next one's Q, and so is no later than others.
  static constexpr int kDescriptions = 4;
  using Description = RingPosition<kDescriptions>;
  alignas(16) char block[kDescriptions][sizeof(RowBlock<Config>)];
  // Full: the description is there; empty: those who load from pages are through with it. Others
  // wait for Q, and the loader asks for the next when they are through with the one that was there.
  static constexpr int kPageWarps = 2;
  Ring<kDescriptions> described;
  Ring<1> asked;  // full: the next description is wanted
  int blocks;     // of the launch, that share its tiles

  __device__ RowBlock<Config>& row_block(uint32_t number) {
    return *reinterpret_cast<RowBlock<Config>*>(block[number % kDescriptions]);
  }

  // in_pages: who describes row blocks also has to let the computing warps begin.
  __device__ void init(int sharing_blocks, bool in_pages) {
    blocks = sharing_blocks;
    for (Ring<1>& ring : q_ring) {
      ring.init(kWarpgroup / 32, in_pages ? 2 : 1);
    }
    k_ring.init(Config::kConsumerWarps);
    v_ring.init(Config::kConsumerWarps);
    described.init(kPageWarps);
    asked.init(1);
    cutlass::arch::fence_barrier_init();
    for (auto& tile : exist) {
      for (uint32_t& keys : tile) {
        keys = ~uint32_t{0};
      }
    }
  }
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

}  // namespace flash::sm90::forward
