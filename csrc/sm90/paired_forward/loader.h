// Loads K and V into both CTAs of a pair, each half of their columns.
#pragma once

#include "core/warp_lanes.h"
#include "sm90/paired_forward/config.h"

namespace flash::sm90::forward {

// All lanes of one warp call its functions together. Of keys in pages, lane l looks up the eight
// from 8 * (l / 2) on; the lanes whose keys have a page are then the keys that exist, in the order
// of fragment_bits (core/mask.h). The first lane of each box loads it.
template <class Config>
struct PairedTileLoader {
  static constexpr int kEight = 8, kLanes = 2 * Config::kBlockN / kEight;
  using Element = typename Config::Element;

  PairedForwardArgs const& args;
  PairedRowBlock<Config> const& block;
  PairedForwardStorage<Config>& smem;
  uint32_t rank;

  // These start a load, if there is such a step, when its buffer is free in both CTAs.
  __device__ void load_keys(int step) const {
    if (step < block.range.count()) {
      load</*kTellsKeys=*/true>(args.k, step, LoadOrder::key(step));
    }
  }
  __device__ void load_values(int step) const {
    if (step < block.range.count()) {
      if (step == 0) {  // where Q was
        smem.q_ring.empty(0).wait(0);
        __syncwarp();
      }
      load</*kTellsKeys=*/false>(args.v, step, LoadOrder::value(step));
    }
  }

 private:
  __device__ static int lane() { return WarpLanes{}.index(); }
  __device__ static int first() { return lane() / 2 * kEight; }

  template <bool kTellsKeys>
  __device__ void load(TensorMap const& map, int step, uint32_t number) const {
    RingPosition<Config::kStages> const at(number);
    int const key_block = block.range.block_at(step);
    if (block.pages.table) {
      return load_pages<kTellsKeys>(map, key_block, at);
    }
    smem.tile_ring.wait_empty(at);
    if (lane() == 0) {
      expect(at);
      load_box(map, block.keys(key_block), 0, at);
    }
    __syncwarp();
  }

  template <bool kTellsKeys>
  __device__ void load_pages(TensorMap const& map, int key_block,
                             RingPosition<Config::kStages> at) const {
    int const key = key_block * Config::kBlockN + first();
    int const left = lane() < kLanes ? block.keys_at.rows - key : 0;
    PageSlot const slot = left > 0 ? block.pages.slot(key) : PageSlot{PageSlot::kNoPage, 0};
    smem.tile_ring.wait_empty(at);
    bool const exists = left > 0 && block.pages.exists(slot);
    uint32_t const existing = __ballot_sync(WarpLanes::kAll, exists);
    if (lane() == 0) {
      if constexpr (kTellsKeys) {
        smem.exist[at.stage] = existing;
      }
      expect(at);
    }
    __syncwarp();
    if (lane() < kLanes && lane() % 2 == 0 && (first() & (args.box_keys - 1)) == 0) {
      load_box(map,
               {slot.row, exists ? min(left, args.box_keys) : 0, block.keys_at.head,
                exists ? slot.page : 0},
               first(), at);
    }
    __syncwarp();
  }

  __device__ void expect(RingPosition<Config::kStages> at) const {
    smem.tile_ring.full(at.stage).arrive_and_expect_tx(Config::kTile * sizeof(Element));
  }

  // first: the box's first key in the tile
  __device__ void load_box(TensorMap const& map, TileCoord const& keys, int first,
                           RingPosition<Config::kStages> at) const {
    load_tile_for_pair<Config::kBlockN, Config::kHeadDim>(
        rank, map, keys, smem.tiles[at.stage] + first * kRun<Config::kHeadDim>,
        smem.tile_ring.full(at.stage), TMA::CacheHintSm90::EVICT_LAST);
  }
};

}  // namespace flash::sm90::forward
