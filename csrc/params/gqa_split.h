#pragma once

#include "params/common.h"
#include "params/fast_div.h"

namespace flash {

// The query heads that a backward's tile goes through, one after the other.
struct HeadsOfTile {
  int head_kv;
  int head_begin;  // the first query head
  int heads;
};

// GQA splits: the query heads of a group, cut so that each split has tiles of its own.
struct GqaSplit {
  int heads;        // of the group
  int split_heads;  // of a split; the last one may have fewer
  int splits;
  FastDiv by_splits;  // because a kernel's producer has no registers for a division

  // heads, split_heads: at least 1
  static GqaSplit of(int heads, int split_heads) {
    int const splits = (heads + split_heads - 1) / split_heads;
    return {heads, split_heads, splits, FastDiv(splits)};
  }

  // Tiles count the splits of a KV head as neighbouring heads.
  FLASH_HD HeadsOfTile heads_of(int tile_head) const {
    int const head_kv = by_splits.quotient(tile_head);
    int const begin = by_splits.remainder(tile_head, head_kv) * split_heads;
    int const left = heads - begin;
    return {head_kv, head_kv * heads + begin, left < split_heads ? left : split_heads};
  }
};

}  // namespace flash
