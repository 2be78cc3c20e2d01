// Launches the gated delta rule's kernels over chunks.
#pragma once

#include "launch/launch_kernel.h"
#include "sm80/linear/delta_factors.h"
#include "sm80/linear/delta_walk.h"

namespace flash::sm80::linear {

template <class Element, int kK>
void launch_factors(DeltaParams const& p, LaunchContext const& launch) {
  using C = FactorsConfig<Element, kK>;
  static_assert(sizeof(FactorsStorage<C>) <= flash::linear::kEveryGpusSmem);
  int64_t const blocks = int64_t(p.forward.sequences.slots) * p.forward.heads;
  launch_kernel<delta_factors_kernel<C>>(launch, {blocks, C::kThreads, sizeof(FactorsStorage<C>)},
                                         p);
}

template <class Element, int kPlan>
void launch_plan(DeltaParams const& p, LaunchContext const& launch) {
  constexpr DeltaPlan plan = flash::linear::kDeltaPlans[kPlan];
  using C = DeltaConfig<Element, kPlan>;
  static_assert(C::kStages * sizeof(DeltaStage<C>) == plan.smem_bytes());
  launch_factors<Element, plan.k_tile>(p, launch);
  ForwardParams const& f = p.forward;
  TileGrid const grid{1, (f.v_dim + C::kV - 1) / C::kV, f.heads, f.sequences.count};
  launch_kernel<delta_walk_kernel<C>>(launch,
                                      {.blocks = grid.count(),
                                       .threads = C::kThreads,
                                       .smem_bytes = plan.smem_bytes(),
                                       .early = true},
                                      p, grid);
}

template <class Element, int kPlan = 0>
void launch_number(int number, DeltaParams const& p, LaunchContext const& launch) {
  if constexpr (kPlan + 1 < flash::linear::kDeltaPlanCount) {
    if (number != kPlan) {
      launch_number<Element, kPlan + 1>(number, p, launch);
      return;
    }
  }
  launch_plan<Element, kPlan>(p, launch);
}

template <class Element>
void launch_any_delta(DeltaParams const& params, LaunchContext const& launch) {
  ForwardParams const& p = params.forward;
  int const smem = launch.device.smem_per_block;
  int const wide = flash::linear::delta_number(p.k_dim, smem, /*narrow=*/false);
  int const v_tile = flash::linear::kDeltaPlans[wide].v_tile();
  int64_t const ctas = int64_t(p.sequences.count) * p.heads * ((p.v_dim + v_tile - 1) / v_tile);
  bool const narrow = p.v_dim <= v_tile / 2 || ctas < launch.device.sm_count;
  launch_number<Element>(flash::linear::delta_number(p.k_dim, smem, narrow), params, launch);
}

}  // namespace flash::sm80::linear
