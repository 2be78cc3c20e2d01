#pragma once

#include "sm90/backward/delta_warp.h"
#include "sm90/paired_backward/config.h"
#include "sm90/paired_backward/paired_tiles.h"

namespace flash::sm90::backward {

template <class Config>
struct PairedStorage {
  using Element = typename Config::Element;
  using Block = KeyBlock<Config>;

  alignas(1024) Element k[Config::kTileK];
  alignas(1024) Element other_k[Config::kTileHalfK];  // other CTA's keys, this one's dQ columns
  alignas(1024) Element v[Config::kTileV];
  alignas(1024) Element q[Config::kQStages][Config::kTileQ];
  alignas(1024) Element dout[Config::kStages][Config::kTileDO];
  alignas(1024) Element ds[Config::kScoreStages][Config::kTileDS];
  alignas(1024) Element other_ds[Config::kScoreStages][Config::kTileDS];
  [[no_unique_address]] DeltaTilesOf<Config> delta;
  alignas(16) RowStats<Config::kBlockM> stats[Config::kQStages];  // come and go with Q
  // Announced with Q, where additions to dQ have an order; more than are loaded and computed at any
  // time.
  static constexpr int kDqIterations = Config::kOrdersDq ? 8 : 0;
  static_assert(!Config::kOrdersDq || kDqIterations > Config::kQStages + 1);
  DqIteration dq_iterations[Config::kOrdersDq ? kDqIterations : 1];  // an array needs an element
  Ring<1> k_ring;  // with other_k; full also announces the KV block in `block`
  Ring<1> v_ring;
  Ring<Config::kQStages> q_ring;             // empty: in both CTAs
  Ring<Config::kStages> dout_ring;           // empty: in both CTAs
  Ring<Config::kScoreStages> ds_ring;        // empty: also its copy in the other CTA
  Ring<Config::kScoreStages> other_ds_ring;  // filled by the other CTA; no warp waits for empty
  DqSemaphoreStorage dq_semaphore;
  PairedDraws draws;
  static constexpr int kDescriptions = 3;                // as in SharedStorage
  alignas(16) char block[kDescriptions][sizeof(Block)];  // what the pair works on

  __device__ DqIteration& dq_iteration(uint32_t number) {
    return dq_iterations[number % kDqIterations];
  }
  __device__ Block& key_block(uint32_t number) {
    return *reinterpret_cast<Block*>(block[number % kDescriptions]);
  }

  // ordered: the semaphore warps read descriptions, too.
  __device__ void init_barriers(bool ordered) {
    constexpr int kWarps = Config::kRoleWarps, kPair = Config::kPair;
    k_ring.init(2 * kWarps + (ordered ? kDqSemaphoreWarps : 0));
    v_ring.init(kWarps);
    draws.ring.init(/*reading_warps=*/1);
    q_ring.init(/*reading_warps=*/2 * kWarps * kPair);
    dout_ring.init(kWarps * kPair);
    ds_ring.init(kWarps * kPair, /*writing_warps=*/kWarps);
    other_ds_ring.init(1);
    dq_semaphore.init(/*adding_warps=*/kWarps);
    delta.init();
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
constexpr int kPairedSmemBytes = sizeof(PairedStorage<Config>);

}  // namespace flash::sm90::backward
