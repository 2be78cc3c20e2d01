// Loads K and V into both CTAs of a pair, each half of their columns.
#pragma once

#include "core/warp_lanes.h"
#include "sm90/paired_forward/config.h"

namespace flash::sm90::forward {

// All lanes of one warp call its functions together.
template <class Config>
struct PairedTileLoader {
  PairedForwardArgs const& args;
  PairedRowBlock<Config> const& block;
  PairedForwardStorage<Config>& smem;
  uint32_t rank;

  // These start a load, if there is such a step, when its buffer is free in both CTAs.
  __device__ void load_keys(int step) const {
    if (step < block.range.count()) {
      load(args.k, step, LoadOrder::key(step));
    }
  }
  __device__ void load_values(int step) const {
    if (step < block.range.count()) {
      if (step == 0) {  // where Q was
        smem.q_ring.empty(0).wait(0);
        __syncwarp();
      }
      load(args.v, step, LoadOrder::value(step));
    }
  }

 private:
  __device__ void load(TensorMap const& map, int step, uint32_t number) const {
    RingPosition<Config::kStages> const at(number);
    smem.tile_ring.wait_empty(at);
    if (WarpLanes{}.index() == 0) {
      Barrier& full = smem.tile_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTile * sizeof(typename Config::Element));
      load_tile_for_pair<Config::kBlockN, Config::kHeadDim>(
          rank, map, block.keys(block.range.block_at(step)), smem.tiles[at.stage], full,
          TMA::CacheHintSm90::EVICT_LAST);
    }
    __syncwarp();
  }
};

}  // namespace flash::sm90::forward
