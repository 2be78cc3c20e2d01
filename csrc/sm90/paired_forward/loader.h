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
  static constexpr int kLanes = 2 * Config::kBlockN / kLeastBoxRows;
  using Element = typename Config::Element;
  static constexpr int kRunColumns = kRun<Config::kHeadDim>;

  PairedForwardArgs const& args;
  PairedRowBlock<Config> const& block;
  PairedForwardStorage<Config>& smem;
  uint32_t rank;

  // These start a load, if there is such a step, when its buffer is free in both CTAs.
  __device__ void load_keys(int step) const {
    if (step < block.range.count()) {
      load</*kTellsKeys=*/true>(args.k, args.k_runs, step, LoadOrder::key(step));
    }
  }
  __device__ void load_values(int step) const {
    if (step < block.range.count()) {
      if (step == 0) {  // where Q was
        smem.q_ring.empty(0).wait(0);
        __syncwarp();
      } else {
        // Only when the step's keys are there does their buffer count their readers: before, a wait
        // until it is empty could return for what was in it earlier, which the other CTA may still
        // read.
        smem.tile_ring.wait_full(RingPosition<Config::kStages>(LoadOrder::key(step)));
        __syncwarp();
      }
      load</*kTellsKeys=*/false>(args.v, args.v_runs, step, LoadOrder::value(step));
    }
  }

 private:
  __device__ static int lane() { return WarpLanes{}.index(); }
  __device__ static int first() { return lane() / 2 * kLeastBoxRows; }

  template <bool kTellsKeys>
  __device__ void load(TensorMap const& map, int runs, int step, uint32_t number) const {
    RingPosition<Config::kStages> const at(number);
    int const key_block = block.range.block_at(step);
    if (block.pages.table) {
      return load_pages<kTellsKeys>(map, runs, key_block, at);
    }
    smem.tile_ring.wait_empty(at);
    if (lane() == 0) {
      expect(runs, at);
      load_box(map, runs, block.keys(key_block), 0, at);
    }
    __syncwarp();
  }

  template <bool kTellsKeys>
  __device__ void load_pages(TensorMap const& map, int runs, int key_block,
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
      expect(runs, at);
    }
    __syncwarp();
    if (lane() < kLanes && lane() % 2 == 0 && (first() & (args.box_keys - 1)) == 0) {
      load_box(map, runs,
               {slot.row, exists ? min(left, args.box_keys) : 0, block.keys_at.head,
                exists ? slot.page : 0},
               first(), at);
    }
    __syncwarp();
  }

  __device__ void expect(int runs, RingPosition<Config::kStages> at) const {
    constexpr int kRunBytes = kRunColumns * Config::kBlockN * sizeof(Element);
    smem.tile_ring.full(at.stage).arrive_and_expect_tx(runs * kRunBytes);
  }

  // Every other run of columns, to both CTAs. first: the box's first key in the tile
  __device__ void load_box(TensorMap const& map, int runs, TileCoord const& keys, int first,
                           RingPosition<Config::kStages> at) const {
    constexpr uint16_t kBoth = 3;
    auto const c = map.coordinates(keys);
    auto* const full = reinterpret_cast<uint64_t*>(&smem.tile_ring.full(at.stage));
    Element* const target = smem.tiles[at.stage] + first * kRunColumns;
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / kRunColumns / Config::kPair; ++n) {
      int const column = (rank + n * Config::kPair) * kRunColumns;
      if (column >= runs * kRunColumns) {
        break;
      }
      SM90_TMA_LOAD_MULTICAST_5D::copy(
          &map.map, full, kBoth, static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
          target + column * Config::kBlockN, column, c.c1, c.c2, c.c3, c.c4);
    }
  }
};

}  // namespace flash::sm90::forward
