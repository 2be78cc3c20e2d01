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

// The tiles of a cluster: its first CTA draws them and sends their numbers to the others. This is
// in the shared memory of all CTAs. Barriers for empty are used in the first CTA, those for full in
// the others.
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
    draws.ring.release_at(0, at.stage);
    return drawn.over() ? KeyTile<Config>{} : drawn.tile_at(drawn.index);
  }

  __device__ bool over() const { return drawn.over(); }

 private:
  __device__ void send(Position at) {
    draws.ring.wait_empty(at);
    uint32_t const lane = threadIdx.x % 32;
    PairedDraws::Draw& draw = draws.draw[at.stage];
    if (lane == 0) {
      draw.index = drawn.index;
      cutlass::arch::fence_view_async_shared();
    }
    __syncwarp();
    if (lane > 0 && lane < Config::kCluster) {
      Barrier& full = draws.ring.full(at.stage);
      full.arrive_and_expect_tx(sizeof(draw), lane);
      copy_to_block(lane, &draw, &draw, sizeof(draw), full);
    }
    __syncwarp();
  }
};

// The parts of S and dP that come from the CTA with the other columns.
template <class Config, bool kExist = Config::kSplitsColumns>
struct OtherParts {
  static constexpr int kStages = 2;                              // S, dP
  float4 numbers[kStages][Config::kPartBytes / sizeof(float4)];  // a thread's are kWarpgroup apart
  // full: `numbers` are here; empty: the other CTA has added what this one sent
  Ring<kStages> ring;

  __device__ void init(int warps) { ring.init(warps); }
};
template <class Config>
struct OtherParts<Config, false> {
  __device__ void init(int) {}
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
  [[no_unique_address]] OtherParts<Config> other_parts;
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
  alignas(16) char block[kDescriptions][sizeof(Block)];  // what the cluster works on

  __device__ DqIteration& dq_iteration(uint32_t number) {
    return dq_iterations[number % kDqIterations];
  }
  __device__ Block& key_block(uint32_t number) {
    return *reinterpret_cast<Block*>(block[number % kDescriptions]);
  }

  // Zeros in the columns that no tensor has, where no load writes. All threads call it before any
  // load.
  __device__ void clear_tiles(BwdParams const& p, CtaPart<Config> part) {
    if (p.head_dim - part.first_column() >= Config::kColumns &&
        p.head_dim_v - part.first_column_v() >= Config::kColumnsV) {
      return;
    }
    auto* const begin = reinterpret_cast<uint4*>(k);
    auto* const end = reinterpret_cast<uint4*>(ds);
    for (uint4* at = begin + threadIdx.x; at < end; at += Config::kThreads) {
      *at = uint4{0, 0, 0, 0};
    }
    cutlass::arch::fence_view_async_shared();
  }

  // ordered: the semaphore warps read descriptions, too.
  __device__ void init_barriers(bool ordered) {
    constexpr int kWarps = Config::kRoleWarps, kPair = Config::kPair;
    k_ring.init(2 * kWarps + (ordered ? kDqSemaphoreWarps : 0));
    v_ring.init(kWarps);
    draws.ring.init(/*reading_warps=*/Config::kCluster - 1);
    q_ring.init(/*reading_warps=*/2 * kWarps * kPair);
    dout_ring.init(kWarps * kPair);
    ds_ring.init(kWarps * kPair, /*writing_warps=*/kWarps);
    other_ds_ring.init(1);
    other_parts.init(kWarps);
    dq_semaphore.init(/*adding_warps=*/kWarps);
    delta.init();
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
constexpr int kPairedSmemBytes = sizeof(PairedStorage<Config>);

}  // namespace flash::sm90::backward
