// Loads tiles of keys by TMA, several steps ahead.
#pragma once

#include "core/warp_lanes.h"
#include "sm90/latent/config.h"

namespace flash::sm90::latent {

// What a launch passes to the kernel.
struct LatentArgs {
  TensorMap k;  // boxes of box_keys keys and 64 columns
  TensorMap v;
  int k_column;  // k's first column; without a rotated part k is v, and this is past its columns
  int box_keys;  // a power of two that divides a tile and a page
  DecodeParams params;
};

// Loads tiles of keys; all lanes of one warp call it together. Lane l looks up the eight keys from
// 8 * (l / 2) on; the lanes whose keys have a page are then the keys that exist, in the order of
// fragment_bits (core/mask.h). The first lane of each box loads it.
template <class Config>
struct KeyLoader {
  static constexpr int kLanes = 2 * Config::kBlockN / kLeastBoxRows;

  LatentArgs const& args;
  decode::DecodeWork<Config> const& work;
  LatentStorage<Config>& smem;

  // Where this lane's keys of the piece's tile `number` are. This only reads the block table:
  // whether the page exists is checked when it is needed, because by then the entry has arrived.
  __device__ PageSlot look_up(int number) const {
    // Without pages a box after the sequence is told to TMA by its row.
    if (keys_left(number) > 0 || !work.pages.table) {
      return work.pages.slot(static_cast<int>(work.tile.info.row_k) + first_key(number) + first());
    }
    return {PageSlot::kNoPage, 0};
  }

  // Starts to load the tile, if there is one, when its buffer is free. slot: its look_up
  __device__ void load(int number, PageSlot slot) const {
    if (first_key(number) >= work.end) {
      return;
    }
    if (number == Config::kStages - 1) {  // where Q was
      smem.q_ring.empty(0).wait(0);
    }
    RingPosition<Config::kStages> const at(number);
    smem.key_ring.wait_empty(at);
    int const left = keys_left(number);
    bool const exists = left > 0 && work.pages.exists(slot);
    uint32_t const existing = __ballot_sync(WarpLanes::kAll, exists);
    Barrier& full = smem.key_ring.full(at.stage);
    if (lane() == 0) {
      smem.exist[at.stage] = existing;
      full.arrive_and_expect_tx(Config::kTile * sizeof(typename Config::Element));
    }
    __syncwarp();
    if (lane() < kLanes && lane() % 2 == 0 && (first() & (args.box_keys - 1)) == 0) {
      load_box({slot.row, exists ? min(left, args.box_keys) : 0, work.tile.head_kv,
                exists ? slot.page : 0},
               smem.keys[at.stage] + first() * kRun<Config::kColumns>, full);
    }
    __syncwarp();
  }

 private:
  __device__ static int lane() { return WarpLanes{}.index(); }
  __device__ static int first() { return lane() / 2 * kLeastBoxRows; }
  __device__ int first_key(int number) const { return work.begin + number * Config::kBlockN; }
  __device__ int keys_left(int number) const {
    return lane() < kLanes ? work.end - first_key(number) - first() : 0;
  }

  __device__ void load_box(TileCoord const& keys, typename Config::Element* target,
                           Barrier& full) const {
    constexpr int kN = Config::kBlockN, kV = Config::kHeadDimV, kRotated = Config::kHeadDim;
    constexpr auto kHint = TMA::CacheHintSm90::EVICT_FIRST;
    load_tile<kN, kV>(args.v, keys, target, full, kHint);
    load_tile<kN, kRotated>(args.k, keys, target + Config::kRotatedPlace, full, kHint,
                            args.k_column);
  }
};

}  // namespace flash::sm90::latent
