// The tiles of a pair of CTAs: the first CTA draws them and tells the other.
#pragma once

#include "sm90/backward/drawn_tiles.h"
#include "sm90/cluster.h"

namespace flash::sm90::backward {

// Lies in the shared memory of both CTAs. Barriers for full are used in the second CTA, those for
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
      tell(at);
      return tile;
    }
    draws.ring.wait_full(at);
    drawn.index = draws.draw[at.stage].index;
    draws.ring.release_in_pair(at.stage);
    return drawn.over() ? KeyTile<Config>{} : drawn.tile_at(drawn.index);
  }

  __device__ bool over() const { return drawn.over(); }

 private:
  __device__ void tell(Position at) {
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

}  // namespace flash::sm90::backward
