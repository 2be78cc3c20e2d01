#pragma once

#include <cstdint>

#include "params/fast_div.h"

namespace flash {

// Which of Hopper's backward kernels have row splits. They cost d 96 1.5% of all calls and the
// others nothing (H200); kernels with score mods and of 192/128 were not timed.
constexpr bool has_row_split(int head_dim, int head_dim_v, bool plain) {
  return plain && head_dim == head_dim_v && head_dim != 96;
}

// The last tiles of a backward, cut into row splits so that few tiles fill a GPU. Each part has
// some of the row blocks that see the tile's keys, and a slot in the workspace for its sums of dK
// and dV.
struct RowSplit {
  int tiles = 0;           // tiles that are cut
  int whole = 0x7fffffff;  // whole tiles before them
  int parts = 1;           // parts of each tile that is cut
  FastDiv by_parts;

  // whole, tiles, parts: at least 0, 1, 2
  static RowSplit last(int whole, int tiles, int parts) {
    return {tiles, whole, parts, FastDiv(parts)};
  }

  FLASH_HD bool used() const { return tiles > 0; }
  FLASH_HD int slots() const { return tiles * parts; }

  // Whole tiles are drawn first, then parts: the parts of a tile one after the other.
  FLASH_HD int slot_of(int drawn) const { return drawn < whole ? -1 : drawn - whole; }
  FLASH_HD int tile_of(int slot) const { return whole + by_parts.quotient(slot); }
  FLASH_HD int part_of(int slot) const { return by_parts.remainder(slot, by_parts.quotient(slot)); }

  // How many of a tile's iterations come before the part's first.
  FLASH_HD int iterations_before(int part, int iterations) const {
    return by_parts.quotient(part * iterations);
  }
};

}  // namespace flash
