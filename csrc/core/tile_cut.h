// Whether a backward cuts its tiles of keys along the rows, and into how many parts: where there
// are few, as of one sequence and few heads, whose longest tiles end long after the others.
#pragma once

#include "core/group_parts.h"

namespace flash {

// What is told of the places that tiles are done at, and of parts.
struct CutLimits {
  int places;          // thread blocks that run at a time
  int block_m;         // parts have whole row blocks
  int64_t most_slots;  // parts of all tiles together
};

constexpr double kPassRows = 100;  // another launch, in the time of so many rows
constexpr int kMostRowParts = 8;

// Rows until the last is done, of tiles whose groups are whole and whose rows are in so many parts.
inline double rows_until_cut_are_done(GroupTiles const& t, int parts, CutLimits const& by) {
  int64_t const blocks = (int64_t(t.most) + by.block_m - 1) / by.block_m;
  double const longest =
      parts > 1 ? t.heads * double((blocks + parts - 1) / parts * by.block_m) : t.heads * t.most;
  double const average = t.rows == t.most ? longest : t.heads * t.rows / parts;
  GroupTiles const cut{1, t.count * parts, average, longest};
  double const sums = parts > 1 ? double(cut.count) * kSumRows / by.places + kPassRows : 0.;
  if (cut.count <= by.places) {  // each of them has a place of its own
    return longest + kTileRows + sums;
  }
  // Whole tiles are thought to fill the places evenly, so that what is cut is surely faster.
  double const even = double(cut.count) * (average + kTileRows) / by.places;
  return parts == 1 && average < longest ? std::max(even, longest + kTileRows)
                                         : rows_until_done(cut, 1, by.places) + sums;
}

// The fewest parts of which more would save less than a twentieth of the time.
inline int best_row_parts(GroupTiles const& t, CutLimits const& by) {
  constexpr double kGain = 0.95;
  int64_t const blocks = (int64_t(t.most) + by.block_m - 1) / by.block_m;
  int64_t const most =
      std::min({blocks, by.most_slots / std::max<int64_t>(t.count, 1), int64_t{kMostRowParts}});
  int best = 1;
  double least = rows_until_cut_are_done(t, best, by);
  for (int parts = 2; parts <= most; ++parts) {
    double const rows = rows_until_cut_are_done(t, parts, by);
    if (rows < kGain * least) {
      best = parts;
      least = rows;
    }
  }
  return best;
}

}  // namespace flash
