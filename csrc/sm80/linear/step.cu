#include "sm80/linear/step.h"

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <string_view>

#include "launch/error.h"
#include "launch/launch_kernel.h"

namespace flash {
namespace sm80::linear {
namespace {

using flash::linear::kMostStepGroups;
using flash::linear::log2_above;

// Tiles of tile_threads threads each, as many a CTA as have `threads` together.
StepGrid grid_of(StepParams const& p, int columns_log2, int groups_log2, int tile_threads,
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

template <class Way>
void launch_on(StepParams const& p, StepGrid const& grid, LaunchContext const& launch) {
  int const groups = grid.tiles_of_cta << grid.groups_log2;
  int const bytes = groups * grid.columns() * static_cast<int>(sizeof(float));
  launch_kernel<step_kernel<Way>>(launch, {grid.ctas(), groups * Way::kGroupThreads, bytes}, p,
                                  grid);
}

constexpr int kThreads = 128;       // of a CTA, if not one tile has more
constexpr int kFewestThreads = 32;  // where CTAs are fewer than multiprocessors

bool leaves_some_idle(StepGrid const& grid, LaunchContext const& launch) {
  return grid.ctas() < launch.device.sm_count;
}

template <class Way>
StepGrid grid_along_v(StepParams const& p, int columns, int threads) {
  int const rows = kStepLoads * Way::kRows;
  int const groups = std::min((p.k_dim + rows - 1) / rows, kMostStepGroups);
  int const groups_log2 = log2_above(groups);
  return grid_of(p, log2_above(columns), groups_log2, Way::kGroupThreads << groups_log2, threads);
}

template <class Element>
void launch_along_v(StepParams const& p, LaunchContext const& launch) {
  using Plain = AlongV<Element, 1, 32>;
  using Wide = AlongV<Element, 4, 8>;
  using Narrow = AlongV<Element, 4, 4>;
  if (!p.aligned) {
    launch_on<Plain>(p, grid_along_v<Plain>(p, 32, kThreads), launch);
    return;
  }
  StepGrid const wide = grid_along_v<Wide>(p, 32, kThreads);
  if (leaves_some_idle(wide, launch)) {
    launch_on<Narrow>(p, grid_along_v<Narrow>(p, 16, kFewestThreads), launch);
  } else {
    launch_on<Wide>(p, wide, launch);
  }
}

template <class Element, int kRun>
void launch_along_k(StepParams const& p, LaunchContext const& launch) {
  int const runs = (p.k_dim + kRun - 1) / kRun;
  int const lanes_log2 = log2_above(std::min(runs, 32));
  int const groups_log2 = log2_above(std::min((runs + 31) / 32, kMostStepGroups));
  int const columns_log2 = log2_above(kStepLoads * 32) - lanes_log2;
  auto const make = [&](int threads) {
    StepGrid grid = grid_of(p, columns_log2, groups_log2, 32 << groups_log2, threads);
    grid.lanes_log2 = lanes_log2;
    return grid;
  };
  StepGrid const grid = make(kThreads);
  launch_on<AlongK<Element, kRun>>(p, leaves_some_idle(grid, launch) ? make(kFewestThreads) : grid,
                                   launch);
}

template <class Element>
void launch_of(StepParams const& p, LaunchContext const& launch) {
  if (!p.along_k) {
    launch_along_v<Element>(p, launch);
  } else if (p.aligned) {
    launch_along_k<Element, 4>(p, launch);
  } else {
    launch_along_k<Element, 1>(p, launch);
  }
}

}  // namespace
}  // namespace sm80::linear

namespace linear {

void launch_step(StepParams const& p, char const* dtype, LaunchContext const& launch) {
  using namespace sm80::linear;
  std::string_view const name(dtype);
  auto const launch_it = name == "bf16"   ? launch_of<cutlass::bfloat16_t>
                         : name == "fp16" ? launch_of<cutlass::half_t>
                                          : launch_of<float>;
  launch_it(p, launch);
}

}  // namespace linear
}  // namespace flash
