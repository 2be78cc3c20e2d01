// The launches of one dtype, by the plan of the call.
#pragma once

#include "sm80/linear/launch.h"

namespace flash::sm80::linear {

// use(number) with the number of the call's plan, as a constant.
template <int kPlan = 0, class Use>
void by_plan(ForwardParams const& p, Use use) {
  constexpr flash::linear::Plan plan = flash::linear::kPlans[kPlan];
  if constexpr (!plan.tiled) {
    if (flash::linear::plan_number(p.k_dim) != kPlan) {
      by_plan<kPlan + 1>(p, use);
      return;
    }
  }
  use(std::integral_constant<int, kPlan>{});
}

// Where there is no plan to walk.
template <class Element>
void launch_any(ForwardParams const& p, LaunchContext const& launch) {
  launch_tiled<Element, std::size(flash::linear::kPlans) - 1>(p, launch);
}

template <class Element>
void launch_any_states(ForwardParams const& p, LaunchContext const& launch) {
  by_plan(p, [&](auto plan) { launch_states<Element, plan()>(p, launch); });
}

}  // namespace flash::sm80::linear
