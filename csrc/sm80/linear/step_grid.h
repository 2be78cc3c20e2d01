// How the tiles of a step are shared out among CTAs.
#pragma once

#include <algorithm>

#include "launch/error.h"
#include "launch/variant.h"
#include "linear/step.h"

namespace flash::sm80::linear {

using flash::linear::StepGrid;
using flash::linear::StepParams;

// Tiles of tile_threads threads each, as many a CTA as have `threads` together.
inline StepGrid grid_of(StepParams const& p, int columns_log2, int groups_log2, int tile_threads,
                        int threads) {
  StepGrid grid{};
  grid.columns_log2 = columns_log2;
  grid.groups_log2 = groups_log2;
  int const tiles = (p.v_dim + grid.columns() - 1) / grid.columns();
  grid.tiles = FastDiv(tiles);
  grid.heads = FastDiv(p.heads);
  grid.group = FastDiv(p.group);
  int64_t const all = int64_t(p.rows) * p.heads * tiles;
  constexpr int64_t kMost =
      max_grid_blocks - flash::linear::kMostStepThreads;  // also of whole CTAs
  check(all <= kMost, all, " tiles of states in one call, at most ", kMost, " are served");
  grid.all_tiles = static_cast<int>(all);
  grid.tiles_of_cta = std::max(1, threads / tile_threads);
  return grid;
}

constexpr int kStepThreads = 128;       // of a CTA, if not one tile has more
constexpr int kFewestStepThreads = 32;  // where CTAs are fewer than multiprocessors

inline bool leaves_some_idle(StepGrid const& grid, LaunchContext const& launch) {
  return grid.ctas() < launch.device.sm_count;
}

}  // namespace flash::sm80::linear
