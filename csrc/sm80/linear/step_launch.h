// How the tiles of a step are shared out among CTAs, and which kernel a call gets.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <string_view>

#include "launch/error.h"
#include "launch/launch_kernel.h"
#include "linear/step.h"

namespace flash::sm80::linear {

using flash::linear::log2_above;
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
constexpr int kFewestStepThreads = 32;  // where CTAs are fewer than SMs

inline bool leaves_some_idle(StepGrid const& grid, LaunchContext const& launch) {
  return grid.ctas() < launch.device.sm_count;
}

// As many groups as K has work for, each with `rows` rows at a time.
inline int groups_log2_of(int k_dim, int rows) {
  return log2_above(std::min((k_dim + rows - 1) / rows, flash::linear::kMostStepGroups));
}

template <class Way>
StepGrid grid_along_v(StepParams const& p, int threads) {
  int const groups_log2 = groups_log2_of(p.k_dim, Way::kGroupRows);
  return grid_of(p, log2_above(Way::kTileColumns), groups_log2, Way::kGroupThreads << groups_log2,
                 threads);
}

// Lanes have kRun rows each, and groups are warps.
template <int kRun>
StepGrid grid_along_k(StepParams const& p, LaunchContext const& launch) {
  int const lanes_log2 = log2_above(std::min((p.k_dim + kRun - 1) / kRun, 32));
  int const groups_log2 = groups_log2_of(p.k_dim, 32 * kRun);
  int const columns_log2 = log2_above(flash::linear::kStepLoads * 32) - lanes_log2;
  auto const make = [&](int threads) {
    StepGrid grid = grid_of(p, columns_log2, groups_log2, 32 << groups_log2, threads);
    grid.lanes_log2 = lanes_log2;
    return grid;
  };
  StepGrid const grid = make(kStepThreads);
  return leaves_some_idle(grid, launch) ? make(kFewestStepThreads) : grid;
}

// Step: its ways through a state, and how it launches the kernel of one.
template <class Step, class Params>
void launch_step_of(Params const& p, StepParams const& step, LaunchContext const& launch) {
  using Plain = typename Step::Plain;
  using Wide = typename Step::Wide;
  using Narrow = typename Step::Narrow;
  if (step.along_k && step.aligned) {
    Step::template launch<typename Step::template AlongK<4>>(p, grid_along_k<4>(step, launch),
                                                             launch);
  } else if (step.along_k) {
    Step::template launch<typename Step::template AlongK<1>>(p, grid_along_k<1>(step, launch),
                                                             launch);
  } else if (!step.aligned) {
    Step::template launch<Plain>(p, grid_along_v<Plain>(step, kStepThreads), launch);
  } else if (StepGrid const wide = grid_along_v<Wide>(step, kStepThreads);
             leaves_some_idle(wide, launch)) {
    Step::template launch<Narrow>(p, grid_along_v<Narrow>(step, kFewestStepThreads), launch);
  } else {
    Step::template launch<Wide>(p, wide, launch);
  }
}

template <template <class Element> class Step, class Params>
void launch_any_step(Params const& p, StepParams const& step, char const* dtype,
                     LaunchContext const& launch) {
  std::string_view const name(dtype);
  auto const launch_it = name == "bf16"   ? launch_step_of<Step<cutlass::bfloat16_t>, Params>
                         : name == "fp16" ? launch_step_of<Step<cutlass::half_t>, Params>
                                          : launch_step_of<Step<float>, Params>;
  launch_it(p, step, launch);
}

}  // namespace flash::sm80::linear
