// Which columns of tiles run side by side, so that what the tiles of a column read comes from
// memory once, or for several of them at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tile_scheduler.h"

namespace flash {

// What a column's tiles have in common: K and V of a forward, Q, dO and dQ of a backward.
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
// H200: a backward takes 1% less at d 128, 2% at d 192, 4% at d 256, a forward 3% at d 192.
constexpr int kHopperSharers = 8;

// Rounds of tiles of unequal length that are to even out.
constexpr int kRounds = 4;

// Columns of few tiles, which differ little: fewer rounds do, whole ones, and leave more of L2.
struct FewTiles {
  int tiles = 0;  // of a column, at most
  int rounds = kRounds;
};

// On an H200, causal, 16k tokens: 512 keys, forward, −4% at d 128 and −2% at d 192; 1k keys,
// backward, −1 to −2% at d 64 to 128 and −2.5% at d 192 and 256.
constexpr FewTiles kFewForwardTiles{4, 2}, kFewBackwardTiles{8, 1};

// Of tiles that wait for others of their column: many columns at work mean few of its tiles at a
// time, so that nobody waits for long.
struct WaitingTiles {
  int l2_eighths = 3;     // that hold what the columns at work read
  int equal_sharers = 1;  // of tiles of equal length: columns are at most places by this
};

// Of thread blocks; of pairs, whose visits are longer: they wait less, and gain by sharing what
// they read; of pairs of more than 192 columns. On an H200, d 256: 512 keys, full, 4% by eight at a
// time; 1k causal 3% by an eighth of L2, with which d 192 loses.
constexpr WaitingTiles kWaitingTiles{3, 1}, kWaitingPairs{2, 8}, kWaitingWidePairs{1, 8};

// Who takes tiles.
struct TileTakers {
  int places;  // thread blocks, or clusters that share a tile, that run at a time
  int sharers = kSharers;
  FewTiles few{};
  WaitingTiles waiting{};
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

// Columns to run side by side whose tiles wait for each other. Of tiles of unequal length half of
// the rows are at work on average.
inline int waiting_columns_side_by_side(int64_t l2_bytes, TileTakers const& takers,
                                        Columns const& columns) {
  WaitingTiles const& waiting = takers.waiting;
  int64_t const tiles = std::max(columns.tiles, 1);
  int64_t const at_work =
      columns.equal_tiles ? columns.bytes : columns.bytes * (tiles + 1) / (2 * tiles);
  int64_t const fitting = l2_bytes / 8 * waiting.l2_eighths / std::max<int64_t>(at_work, 1);
  int const most = columns.equal_tiles ? takers.places / waiting.equal_sharers : takers.places;
  int64_t const limit = std::max<int64_t>(fitting, takers.places / takers.sharers);
  int64_t const group = std::min({limit, int64_t(most), columns.count});
  return even_group(static_cast<int>(std::max<int64_t>(group, 1)), columns.count);
}

}  // namespace flash
