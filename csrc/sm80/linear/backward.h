// The launch of the gradients of one dtype, by K.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/gradients.h"

namespace flash::sm80::linear {

template <class Element, int kTiling = 0>
void launch_any_gradients(BackwardParams const& p, LaunchContext const& launch) {
  constexpr flash::linear::GradientsTiling tiling = flash::linear::kGradientsTilings[kTiling];
  if constexpr (!tiling.tiled) {
    if (flash::linear::gradients_tiling_number(p.forward.k_dim) != kTiling) {
      launch_any_gradients<Element, kTiling + 1>(p, launch);
      return;
    }
  }
  using C = GradientsConfig<Element, tiling.k_tile, tiling.v_tile, tiling.tiled>;
  static_assert(sizeof(GradientsStorage<C>) <= flash::linear::kEveryGpusSmem);
  int64_t const blocks = int64_t(p.forward.sequences.slots) * p.forward.heads;
  launch_kernel<gradients_kernel<C>>(launch, {blocks, C::kThreads, sizeof(GradientsStorage<C>)}, p);
}

}  // namespace flash::sm80::linear
