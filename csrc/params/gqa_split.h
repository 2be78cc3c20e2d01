#pragma once

#include "params/common.h"
#include "params/fast_div.h"

namespace flash {

// The query heads of a group that a tile of keys goes through, one after the other.
struct GroupPart {
  int head_kv;
  int head_begin;  // the first query head
  int heads;
};

// The query heads that share a KV head, cut into parts; each part has tiles of its own.
struct HeadGroup {
  int heads;       // of the group
  int part_heads;  // of a part; the last one may have fewer
  int parts;
  FastDiv by_parts;  // the loader of a kernel has no registers for a division

  // heads, part_heads: at least 1
  static HeadGroup in_parts(int heads, int part_heads) {
    int const parts = (heads + part_heads - 1) / part_heads;
    return {heads, part_heads, parts, FastDiv(parts)};
  }

  // Tiles count the parts of a KV head as neighbouring heads.
  FLASH_HD GroupPart part(int tile_head) const {
    int const head_kv = by_parts.quotient(tile_head);
    int const begin = by_parts.remainder(tile_head, head_kv) * part_heads;
    int const left = heads - begin;
    return {head_kv, head_kv * heads + begin, left < part_heads ? left : part_heads};
  }
};

}  // namespace flash
