// Keys in pages: a tile of them is several boxes of TMA, each from one page.
#pragma once

#include "core/paging.h"
#include "core/warp_lanes.h"
#include "sm90/forward/row_block.h"

namespace flash::sm90 {

// What one lane of the loading warp knows of a tile of keys: where the eight keys from 8 * (lane /
// 2) on are. The lanes that find theirs are then keys that exist, in the order of fragment_bits
// (core/mask.h).
struct KeyEight {
  static constexpr int kKeys = 8;  // pages and boxes are multiples of it

  int first;  // of the tile
  int keys;   // of the sequence, from `first` on, but no more than a box has
  PageSlot slot;

  // The table's entry is then on its way, and asked for where it is needed.
  template <class Config>
  __device__ KeyEight(ForwardArgs const& args, RowBlock<Config> const& block, int step)
      : first(WarpLanes{}.index() / 2 * kKeys), slot{PageSlot::kNoPage, 0} {
    static_assert(Config::kBlockN <= WarpLanes::kCount / 2 * kKeys);
    int const position = block.range.block_at(step) * Config::kBlockN + first;
    keys = min(block.keys_at.rows - position, args.box_keys);
    if (keys > 0) {
      slot = KeyPages(args.params.pages, block.tile.batch).slot(position);
    }
  }

  __device__ bool begins_box(ForwardArgs const& args, int tile_keys) const {
    return WarpLanes{}.index() % 2 == 0 && first < tile_keys &&
           (first & (args.box_keys - 1)) == 0;
  }
};

// Whether a page of the keys that the row block goes through is missing. By all lanes of a warp.
template <class Config>
__device__ bool misses_pages(ForwardArgs const& args, RowBlock<Config> const& block) {
  KeyPages const pages(args.params.pages, block.tile.batch);
  int const begin = block.range.begin * Config::kBlockN;
  int const end = min(block.range.end * Config::kBlockN, block.keys_at.rows);
  int const entries_end = begin < end ? pages.page_size.quotient(end - 1) + 1 : 0;
  bool missing = false;
#pragma unroll 4
  for (int entry = pages.page_size.quotient(begin) + WarpLanes{}.index(); entry < entries_end;
       entry += WarpLanes::kCount) {
    missing |= !pages.exists({pages.page(entry), 0});
  }
  return __any_sync(WarpLanes::kAll, missing);
}

}  // namespace flash::sm90
