#pragma once

#include <type_traits>

#include "sm90/backward/delta_warp.h"

namespace flash::sm90::backward {

template <class Config>
struct SharedStorage {
  using Element = typename Config::Element;

  alignas(1024) Element k[Config::kKeyStages][Config::kTileK];
  alignas(1024) Element v[Config::kTileV];
  alignas(1024) Element q[Config::kStages][Config::kTileQ];
  alignas(1024) Element dout[Config::kDoutStages][Config::kTileDO];
  alignas(1024) Element ds[Config::kScoreStages][Config::kTileDS];
  [[no_unique_address]] DeltaTilesOf<Config> delta;
  alignas(16) RowStats<Config::kBlockM> stats[Config::kStages];  // come and go with Q
  // More than are loaded and computed at any time.
  static constexpr int kRowIterations = 8;
  static_assert(kRowIterations > Config::kStages + 1);
  using Iteration = std::conditional_t<Config::kOrdersDq, DqIteration, RowIteration>;
  Iteration row_iterations[kRowIterations];  // come with Q
  // Full also announces the KV block in `block`; in a stream of tiles it means nothing else, and K
  // arrives with the tile's first Q.
  Ring<Config::kKeyStages> k_ring;
  Ring<1> v_ring;
  Ring<Config::kStages> q_ring;
  Ring<Config::kDoutStages> dout_ring;
  Ring<Config::kScoreStages> ds_ring;  // filled and emptied by consumers
  DqSemaphoreStorage dq_semaphore;
  // Three: the producer announces a KV block while consumers compute the one before, and a late
  // warp may still be storing the one before that. One more in a stream of tiles: m + 1 is
  // announced when K and V of m - 1 have been asked for, so that those of m - 3 and m - 2 were
  // released, and no warp needs m - 3 any more.
  static constexpr int kDescriptions = Config::kStreamsTiles ? 4 : 3;
  alignas(16) char block[kDescriptions][sizeof(KeyBlock<Config>)];

  __device__ Iteration& row_iteration(uint32_t number) {
    return row_iterations[number % kRowIterations];
  }
  __device__ KeyBlock<Config>& key_block(uint32_t number) {
    return *reinterpret_cast<KeyBlock<Config>*>(block[number % kDescriptions]);
  }

  // ordered: the semaphore warps read descriptions, too.
  __device__ void init_barriers(bool ordered) {
    k_ring.init(Config::kConsumerWarps + (ordered ? kDqSemaphoreWarps : 0));
    v_ring.init(Config::kConsumerWarps);
    q_ring.init(Config::kConsumerWarps);
    dout_ring.init(Config::kConsumerWarps);
    ds_ring.init(Config::kConsumerWarps, /*writing_warps=*/Config::kConsumerWarps);
    dq_semaphore.init(Config::kConsumerWarps);
    delta.init();
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

}  // namespace flash::sm90::backward
