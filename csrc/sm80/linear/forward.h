// The forward of one dtype, by the plan of the call.
#pragma once

#include "sm80/linear/launch.h"

namespace flash::sm80::linear {

template <class Element, int kPlan = 0>
void launch_any(ForwardParams const& p, LaunchContext const& launch) {
  constexpr flash::linear::Plan plan = flash::linear::kPlans[kPlan];
  if constexpr (!plan.tiled) {
    if (flash::linear::plan_number(p.k_dim, launch.device.smem_per_block) != kPlan) {
      launch_any<Element, kPlan + 1>(p, launch);
      return;
    }
  }
  launch_forward<Element, kPlan>(p, launch);
}

}  // namespace flash::sm80::linear
