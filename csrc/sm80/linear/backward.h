// The launch of the gradients of one dtype, by K.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/gradients.h"

namespace flash::sm80::linear {

template <class Element, int kPlan = 0>
void launch_any_gradients(BackwardParams const& p, LaunchContext const& launch) {
  constexpr flash::linear::GradientsPlan plan = flash::linear::kGradientsPlans[kPlan];
  if constexpr (!plan.tiled) {
    if (flash::linear::gradients_plan_number(p.forward.k_dim) != kPlan) {
      launch_any_gradients<Element, kPlan + 1>(p, launch);
      return;
    }
  }
  using C = GradientsConfig<Element, plan.k_tile, plan.v_tile, plan.tiled>;
  static_assert(sizeof(GradientsStorage<C>) <= flash::linear::kEveryGpusSmem);
  int64_t const blocks = int64_t(p.forward.sequences.slots) * p.forward.heads;
  launch_kernel<gradients_kernel<C>>(launch, {blocks, C::kThreads, sizeof(GradientsStorage<C>)}, p);
}

}  // namespace flash::sm80::linear
