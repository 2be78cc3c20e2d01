#include "sm80/linear/step.h"

#include <cutlass/numeric_types.h>

#include <string_view>

#include "launch/launch_kernel.h"
#include "sm80/linear/step_grid.h"

namespace flash {
namespace sm80::linear {
namespace {

using flash::linear::kMostStepGroups;
using flash::linear::log2_above;

template <class Way>
void launch_on(StepParams const& p, StepGrid const& grid, LaunchContext const& launch) {
  int const groups = grid.tiles_of_cta << grid.groups_log2;
  int const bytes = groups * grid.columns() * static_cast<int>(sizeof(float));
  launch_kernel<step_kernel<Way>>(launch, {grid.ctas(), groups * Way::kGroupThreads, bytes}, p,
                                  grid);
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
    launch_on<Plain>(p, grid_along_v<Plain>(p, 32, kStepThreads), launch);
    return;
  }
  StepGrid const wide = grid_along_v<Wide>(p, 32, kStepThreads);
  if (leaves_some_idle(wide, launch)) {
    launch_on<Narrow>(p, grid_along_v<Narrow>(p, 16, kFewestStepThreads), launch);
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
  StepGrid grid = make(kStepThreads);
  if (leaves_some_idle(grid, launch)) {
    grid = make(kFewestStepThreads);
  }
  launch_on<AlongK<Element, kRun>>(p, grid, launch);
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
