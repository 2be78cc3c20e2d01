#pragma once

#include <cstdint>

#include "params/fast_div.h"

namespace flash {

// Which of Hopper's backward kernels can cut tiles. That they can costs d 96 1.5% of all calls, the
// others nothing (H200); others that cannot were not timed.
constexpr bool cuts_tiles(int head_dim, int head_dim_v, bool plain) {
  return plain && head_dim == head_dim_v && head_dim != 96;
}

// The last tiles of a backward, cut into parts so that few of them fill a GPU: each part has a run
// of the row blocks that see a tile's keys, and its sums of dK and dV a slot of their own in the
// workspace.
struct CutTiles {
  int count = 0;           // of tiles that are cut
  int whole = 0x7fffffff;  // tiles before those
  int parts = 1;           // of each that is cut
  FastDiv by_parts;

  // whole, count, parts: at least 0, 1, 2
  static CutTiles last(int whole, int count, int parts) {
    return {count, whole, parts, FastDiv(parts)};
  }

  FLASH_HD bool used() const { return count > 0; }
  FLASH_HD int slots() const { return count * parts; }

  // Whole tiles are drawn first, then parts: those of a tile one after the other.
  FLASH_HD int slot_of(int drawn) const { return drawn < whole ? -1 : drawn - whole; }
  FLASH_HD int tile_of(int slot) const { return whole + by_parts.quotient(slot); }
  FLASH_HD int part_of(int slot) const { return by_parts.remainder(slot, by_parts.quotient(slot)); }

  // Of `steps` of a tile, those before the part's first.
  FLASH_HD int steps_before(int part, int steps) const { return by_parts.quotient(part * steps); }
};

}  // namespace flash
