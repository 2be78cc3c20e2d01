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

template <class Element, int kTiling>
void launch_tiling(DeltaParams const& p, LaunchContext const& launch) {
  constexpr DeltaTiling tiling = flash::linear::kDeltaTilings[kTiling];
  using C = DeltaConfig<Element, kTiling>;
  static_assert(C::kStages * sizeof(DeltaStage<C>) == tiling.smem_bytes());
  launch_factors<Element, tiling.k_tile>(p, launch);
  ForwardParams const& f = p.forward;
  LinearTiles const grid{1, (f.v_dim + C::kV - 1) / C::kV, f.heads, f.sequences.count};
  launch_kernel<delta_walk_kernel<C>>(launch,
                                      {.blocks = grid.count(),
                                       .threads = C::kThreads,
                                       .smem_bytes = tiling.smem_bytes(),
                                       .early = true},
                                      p, grid);
}

template <class Element, int kTiling = 0>
void launch_number(int number, DeltaParams const& p, LaunchContext const& launch) {
  if constexpr (kTiling + 1 < flash::linear::kDeltaTilingCount) {
    if (number != kTiling) {
      launch_number<Element, kTiling + 1>(number, p, launch);
      return;
    }
  }
  launch_tiling<Element, kTiling>(p, launch);
}

template <class Element>
void launch_any_delta(DeltaParams const& params, LaunchContext const& launch) {
  ForwardParams const& p = params.forward;
  int const smem = launch.device.smem_per_block;
  int const wide = flash::linear::delta_number(p.k_dim, smem, /*narrow=*/false);
  int const v_tile = flash::linear::kDeltaTilings[wide].v_tile();
  int64_t const ctas = int64_t(p.sequences.count) * p.heads * ((p.v_dim + v_tile - 1) / v_tile);
  bool const narrow = p.v_dim <= v_tile / 2 || ctas < launch.device.sm_count;
  launch_number<Element>(flash::linear::delta_number(p.k_dim, smem, narrow), params, launch);
}

}  // namespace flash::sm80::linear
