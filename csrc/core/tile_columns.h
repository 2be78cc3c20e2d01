// Which columns of tiles run side by side, so that what the tiles of a column read comes from
// memory once, or for several of them at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_scheduler.h"

namespace flash {

// What a column's tiles have in common: K and V.
struct Columns {
  int64_t count;
  int64_t bytes;     // that the tiles of a column read
  int sharing;       // neighbouring columns that read the same bytes
  int tiles;         // of a column
  bool equal_tiles;  // all of them take the same time
};

// Tiles of a column that run at a time, at least: those that start together read together, and a
// quarter of what L2 hands out is no limit to memory.
constexpr int kSharers = 4;

// On Hopper, where with four of them a causal call's columns are more than L2 holds. 2k keys on an
// H200: a forward takes 3% less at d 192.
constexpr int kHopperSharers = 8;

// Rounds of tiles of unequal length that are to even out.
constexpr int kRounds = 4;

// Columns of few tiles, which differ little: fewer rounds do, whole ones, and leave more of L2.
struct FewTiles {
  int tiles = 0;  // of a column, at most
  int rounds = kRounds;
};

// On an H200, causal, 16k tokens: 512 keys, forward, −4% at d 128 and −2% at d 192.
constexpr FewTiles kFewForwardTiles{4, 2};

// What takes tiles.
struct TileTakers {
  int places;  // thread blocks, or clusters that share a tile, that run at a time
  int sharers = kSharers;
  FewTiles few{};
};

// Columns that have so many tiles together: not less, or, of few tiles, not more.
inline int64_t filling_columns(TileTakers const& takers, Columns const& columns) {
  bool const few = !columns.equal_tiles && columns.tiles <= takers.few.tiles;
  int64_t const rounds = columns.equal_tiles ? 1 : few ? takers.few.rounds : kRounds;
  int64_t const whole = rounds * takers.places / std::max(columns.tiles, 1);
  return few ? std::max<int64_t>(whole, 1) : whole + 1;
}

// Where L2 has no room for the bytes of two, a group ends with those that share them: one across
// would read both anew for each tile.
inline int within_shared(int group, int64_t l2_bytes, Columns const& columns) {
  int const sharing = columns.sharing;
  if (sharing <= 1 || columns.count <= sharing || 2 * columns.bytes <= l2_bytes) {
    return group;
  }
  if (group >= sharing) {
    return group - group % sharing;
  }
  while (sharing % group != 0) {
    --group;
  }
  return group;
}

// Columns to run side by side. Tiles of equal length: as many as fill the GPU once, so that a
// column's tiles run together and what they share is read from memory once, at a steady rate. Tiles
// of unequal length even out inside a group only, so there a group is some times as wide. It ends
// where the columns neither fit half of L2 (the rest is for what is on its way) nor run so
// many tiles at a time as are to share what they read.
inline int columns_side_by_side(int64_t l2_bytes, TileTakers const& takers,
                                Columns const& columns) {
  int64_t const filling = filling_columns(takers, columns);
  int const fitting = l2_group(l2_bytes / 2, columns.bytes, columns.sharing, columns.count);
  int64_t const limit = std::max(fitting, takers.places / takers.sharers);
  int64_t const group = std::min({filling, limit, std::max<int64_t>(columns.count, 1)});
  int const even = even_group(static_cast<int>(group), columns.count);
  return within_shared(even, l2_bytes, columns);
}

}  // namespace flash
