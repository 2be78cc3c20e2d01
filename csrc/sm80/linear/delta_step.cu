#include "sm80/linear/delta_step.h"

#include "sm80/linear/step_launch.h"

namespace flash {
namespace sm80::linear {
namespace {

template <class Element>
struct DeltaStep {
  using Plain = DeltaAlongV<Element, 1, 16, 2, 2 * kStepLoads>;
  using Wide = DeltaAlongV<Element, 4, 8, 4, kStepLoads>;
  using Narrow = DeltaAlongV<Element, 4, 4, 4, kStepLoads>;
  template <int kRun>
  using AlongK = DeltaAlongK<Element, kRun>;

  template <class Way>
  static void launch(DeltaStepParams const& p, StepGrid const& grid, LaunchContext const& launch) {
    int const threads = (grid.tiles_of_cta << grid.groups_log2) * Way::kGroupThreads;
    int const bytes = DeltaSmem<Way>::bytes(grid, threads);
    launch_kernel<delta_step_kernel<Way>>(launch, {grid.ctas(), threads, bytes}, p, grid);
  }
};

}  // namespace
}  // namespace sm80::linear

namespace linear {

void launch_delta_step(DeltaStepParams const& p, char const* dtype, LaunchContext const& launch) {
  sm80::linear::launch_any_step<sm80::linear::DeltaStep>(p, p.step, dtype, launch);
}

}  // namespace linear
}  // namespace flash
