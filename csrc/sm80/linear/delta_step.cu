#include "sm80/linear/delta_step.h"

#include <cutlass/numeric_types.h>

#include <string_view>

#include "launch/launch_kernel.h"
#include "sm80/linear/step_grid.h"

namespace flash {
namespace sm80::linear {
namespace {

using flash::linear::log2_above;

template <class Way>
void launch_on(DeltaStepParams const& p, StepGrid const& grid, LaunchContext const& launch) {
  int const groups = grid.tiles_of_cta << grid.groups_log2;
  int const bytes = groups * DeltaParts::size(grid.columns()) * static_cast<int>(sizeof(float));
  launch_kernel<delta_step_kernel<Way>>(launch, {grid.ctas(), groups * Way::kGroupThreads, bytes},
                                        p, grid);
}

template <class Way>
StepGrid grid_along_v(StepParams const& p, int columns, int threads) {
  constexpr int kRows = Way::kLoads * Way::kRowLanes;  // of a group
  static_assert(kRows * flash::linear::kMostStepGroups == flash::linear::kDeltaStepK);
  int const groups_log2 = log2_above((p.k_dim + kRows - 1) / kRows);
  return grid_of(p, log2_above(columns), groups_log2, Way::kGroupThreads << groups_log2, threads);
}

template <class Element>
void launch_along_v(DeltaStepParams const& p, LaunchContext const& launch) {
  using Plain = DeltaAlongV<Element, 1, 16, 2, 2 * kStepLoads>;
  using Wide = DeltaAlongV<Element, 4, 8, 4, kStepLoads>;
  using Narrow = DeltaAlongV<Element, 4, 4, 4, kStepLoads>;
  if (!p.step.aligned) {
    launch_on<Plain>(p, grid_along_v<Plain>(p.step, 16, kStepThreads), launch);
    return;
  }
  StepGrid const wide = grid_along_v<Wide>(p.step, 32, kStepThreads);
  if (leaves_some_idle(wide, launch)) {
    launch_on<Narrow>(p, grid_along_v<Narrow>(p.step, 16, kFewestStepThreads), launch);
  } else {
    launch_on<Wide>(p, wide, launch);
  }
}

template <class Element, int kRun>
void launch_along_k(DeltaStepParams const& p, LaunchContext const& launch) {
  static_assert(32 * kRun * flash::linear::kMostStepGroups >= flash::linear::kDeltaStepK);
  int const runs = (p.step.k_dim + kRun - 1) / kRun;
  int const lanes_log2 = log2_above(std::min(runs, 32));
  int const groups_log2 = log2_above((runs + 31) / 32);
  int const columns_log2 = log2_above(kStepLoads * 32) - lanes_log2;
  auto const make = [&](int threads) {
    StepGrid grid = grid_of(p.step, columns_log2, groups_log2, 32 << groups_log2, threads);
    grid.lanes_log2 = lanes_log2;
    return grid;
  };
  StepGrid grid = make(kStepThreads);
  if (leaves_some_idle(grid, launch)) {
    grid = make(kFewestStepThreads);
  }
  launch_on<DeltaAlongK<Element, kRun>>(p, grid, launch);
}

template <class Element>
void launch_of(DeltaStepParams const& p, LaunchContext const& launch) {
  if (!p.step.along_k) {
    launch_along_v<Element>(p, launch);
  } else if (p.step.aligned) {
    launch_along_k<Element, 4>(p, launch);
  } else {
    launch_along_k<Element, 1>(p, launch);
  }
}

}  // namespace
}  // namespace sm80::linear

namespace linear {

void launch_delta_step(DeltaStepParams const& p, char const* dtype, LaunchContext const& launch) {
  using namespace sm80::linear;
  std::string_view const name(dtype);
  auto const launch_it = name == "bf16"   ? launch_of<cutlass::bfloat16_t>
                         : name == "fp16" ? launch_of<cutlass::half_t>
                                          : launch_of<float>;
  launch_it(p, launch);
}

}  // namespace linear
}  // namespace flash
