// How many query heads of a group a backward's tile of keys has: all of them, or, where that leaves
// multiprocessors idle, a part, with sums of dK and dV that are added up at the end.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash {

// The tiles of a call whose groups are whole, alike or the longest first.
struct GroupTiles {
  int heads;      // query heads of a group
  int64_t count;  // of tiles
  double rows;    // of a query head that a tile goes through, on average
  double most;    // and at most

  int64_t parts(int part_heads) const { return (heads + part_heads - 1) / part_heads; }
  // Of the longest of so many parts.
  int part_heads(int64_t parts) const { return int((heads + parts - 1) / parts); }
};

// What else takes time, in rows: those that a thread block goes through meanwhile.
constexpr double kTileRows = 100;  // a tile's beginning and end
constexpr double kSumRows = 160;   // a tile's sums in fp32, written and read

// Rows until the last of `places` that thread blocks run at is done; a shorter last part counts as
// a whole one. Tiles that are alike come in waves. Others fill the places evenly, except that the
// last ones may begin late: an H200 loses a seventh where the longest takes as long as all of a
// place's together, a thirtieth where it takes half of that.
inline double rows_until_done(GroupTiles const& t, int part_heads, int places) {
  constexpr double kUneven = 0.15;
  double const parts = double(t.parts(part_heads)), tiles = double(t.count) * parts;
  double const longest = part_heads * t.most + kTileRows;
  double const sums = parts > 1 ? tiles * kSumRows / places : 0.;
  if (t.rows == t.most) {
    int64_t const waves = (t.count * t.parts(part_heads) + places - 1) / places;
    return double(waves) * longest + sums;
  }
  double const even = tiles * (part_heads * t.rows + kTileRows) / places;
  return std::max(even, longest) + kUneven * longest * longest / even + sums;
}

// The fewest parts, up to `most_parts`, of which more would save less than a thirtieth of the time.
inline int best_part_heads(GroupTiles const& t, int places, int64_t most_parts) {
  constexpr double kGain = 0.97;
  int best = t.heads;
  double least = rows_until_done(t, best, places);
  for (int64_t parts = 2; parts <= std::min<int64_t>(most_parts, t.heads); ++parts) {
    int const heads = t.part_heads(parts);
    double const rows = rows_until_done(t, heads, places);
    if (rows < kGain * least) {
      best = heads;
      least = rows;
    }
  }
  return best;
}

}  // namespace flash
