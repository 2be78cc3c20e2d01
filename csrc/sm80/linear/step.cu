#include "sm80/linear/step.h"

#include "sm80/linear/step_launch.h"

namespace flash {
namespace sm80::linear {
namespace {

template <class Element>
struct Step {
  using Plain = AlongV<Element, 1, 32>;
  using Wide = AlongV<Element, 4, 8>;
  using Narrow = AlongV<Element, 4, 4>;
  template <int kRun>
  using AlongK = linear::AlongK<Element, kRun>;

  template <class Way>
  static void launch(StepParams const& p, StepGrid const& grid, LaunchContext const& launch) {
    int const groups = grid.tiles_of_cta << grid.groups_log2;
    int const bytes = groups * grid.columns() * static_cast<int>(sizeof(float));
    launch_kernel<step_kernel<Way>>(launch, {grid.ctas(), groups * Way::kGroupThreads, bytes}, p,
                                    grid);
  }
};

}  // namespace
}  // namespace sm80::linear

namespace linear {

void launch_step(StepParams const& p, char const* dtype, LaunchContext const& launch) {
  sm80::linear::launch_any_step<sm80::linear::Step>(p, p, dtype, launch);
}

}  // namespace linear
}  // namespace flash
