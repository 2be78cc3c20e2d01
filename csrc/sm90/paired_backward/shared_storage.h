#pragma once

#include "sm90/backward/delta_warp.h"
#include "sm90/backward/drawn_tiles.h"
#include "sm90/cluster.h"
#include "sm90/paired_backward/config.h"

namespace flash::sm90::backward {

// Where the Q, dO and dS of a warpgroup's iteration are in their rings.
template <class Config>
struct RingPositions {
  using OfQ = RingPosition<Config::kQStages>;
  using OfDO = RingPosition<Config::kStages>;
  using OfDS = RingPosition<Config::kScoreStages>;

  uint32_t iterations = 0;  // row blocks so far

  __device__ OfQ q() const { return Config::kAdvances ? q_ : OfQ(iterations); }
  __device__ OfDO dout() const { return Config::kAdvances ? dout_ : OfDO(iterations); }
  __device__ OfDS ds() const { return Config::kAdvances ? ds_ : OfDS(iterations); }

  __device__ void advance() {
    ++iterations;
    q_.advance();
    dout_.advance();
    ds_.advance();
  }

 private:
  OfQ q_{0};
  OfDO dout_{0};
  OfDS ds_{0};
};

// The tiles of a pair of CTAs: the first CTA draws them and sends their numbers to the other. This
// is in the shared memory of both CTAs. Barriers for full are used in the second CTA, those for
// empty in the first.
struct PairedDraws {
  static constexpr int kStages = 2;
  struct alignas(16) Draw {
    uint32_t index;
  };
  Draw draw[kStages];
  Ring<kStages> ring;
};

// All lanes of the producer warps call its functions together.
template <class Config>
struct PairedTiles {
  using Position = RingPosition<PairedDraws::kStages>;

  DrawnTiles<Config> drawn;
  PairedDraws& draws;
  uint32_t rank;
  uint32_t number = 0;  // draws so far

  __device__ KeyTile<Config> next() {
    Position const at(number++);
    if (rank == 0) {
      KeyTile<Config> const tile = drawn.next();
      send(at);
      return tile;
    }
    draws.ring.wait_full(at);
    drawn.index = draws.draw[at.stage].index;
    draws.ring.release_in_pair(at.stage);
    return drawn.over() ? KeyTile<Config>{} : drawn.tile_at(drawn.index);
  }

  __device__ bool over() const { return drawn.over(); }

 private:
  __device__ void send(Position at) {
    draws.ring.wait_empty(at);
    if (threadIdx.x % 32 == 0) {
      PairedDraws::Draw& draw = draws.draw[at.stage];
      draw.index = drawn.index;
      cutlass::arch::fence_view_async_shared();
      Barrier& full = draws.ring.full(at.stage);
      full.arrive_and_expect_tx(sizeof(draw), 1);
      copy_to_block(1, &draw, &draw, sizeof(draw), full);
    }
    __syncwarp();
  }
};

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
