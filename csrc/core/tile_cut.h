// How many of a backward's last tiles are cut along the rows, and into how many parts, so that no
// multiprocessor idles while the last ones are done.
#pragma once

#include "core/group_parts.h"

namespace flash {

struct TileCut {
  int64_t count = 0;  // of tiles, the last ones
  int parts = 1;      // of each
};

// What is told of the places that tiles are done at, and of parts.
struct CutLimits {
  int places;          // thread blocks that run at a time
  int block_m;         // parts have whole row blocks
  int64_t most_slots;  // parts of all cut tiles together
};

constexpr double kPassRows = 100;  // another launch, in the time of so many rows
constexpr int kMostCutParts = 64;

// Rows until the last is done, of tiles whose groups are whole.
inline double rows_until_done(GroupTiles const& t, TileCut cut, CutLimits const& by) {
  if (cut.count == 0) {
    return rows_until_done(t, t.heads, by.places);
  }
  double const slots = double(cut.count) * cut.parts;
  double const sums = slots * kSumRows / by.places + kPassRows;
  if (t.rows != t.most) {
    GroupTiles const parts{1, cut.count * cut.parts, t.heads * t.rows / cut.parts,
                           t.heads * t.most / cut.parts};
    return rows_until_done(parts, 1, by.places) + sums;
  }
  int64_t const blocks = (int64_t(t.most) + by.block_m - 1) / by.block_m;
  double const part = double((blocks + cut.parts - 1) / cut.parts * by.block_m);
  double const rounds = double((t.count - cut.count + by.places - 1) / by.places);
  double const of_parts = double((cut.count * cut.parts + by.places - 1) / by.places);
  return rounds * (t.heads * t.most + kTileRows) + of_parts * (t.heads * part + kTileRows) + sums;
}

// None, unless another saves a hundredth of the time, or a twentieth where that is less well known.
// Of tiles that are alike what is beyond whole rounds, or a round more; of others, whose longest
// come first, all or none.
inline TileCut best_cut(GroupTiles const& t, CutLimits const& by) {
  bool const alike = t.rows == t.most;
  double const kGain = alike ? 0.99 : 0.95;
  int64_t const rest = alike ? t.count % by.places : t.count;
  int64_t const blocks = (int64_t(t.most) + by.block_m - 1) / by.block_m;
  TileCut best;
  double least = kGain * rows_until_done(t, best, by);
  for (int64_t count : {rest, rest + by.places}) {
    if (count == 0 || count > t.count || (count == by.places && rest == 0)) {
      continue;
    }
    for (int parts = 2; parts <= std::min<int64_t>(blocks, kMostCutParts); ++parts) {
      if (count * parts > by.most_slots) {
        break;
      }
      TileCut const cut{count, parts};
      double const rows = rows_until_done(t, cut, by);
      if (rows < least) {
        best = cut;
        least = rows;
      }
    }
  }
  return best;
}

}  // namespace flash
