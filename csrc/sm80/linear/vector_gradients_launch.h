// Launches the kernels of dQ and dK with a vector of decays.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/vector_gradients.h"

namespace flash::sm80::linear {

template <class C>
void launch_vector_gradient(VectorGradientsParams const& p, LaunchContext const& launch) {
  static_assert(sizeof(VectorGradientsStorage<C>) <= flash::linear::kEveryGpusSmem);
  ForwardParams const& f = p.walk.forward;
  LinearTiles const grid{(f.k_dim + C::kK - 1) / C::kK, (f.v_dim + C::kV - 1) / C::kV,
                         (f.heads + C::kHeads - 1) / C::kHeads, f.sequences.slots};
  int const number = flash::linear::vector_number(f.k_dim);
  auto const& summed = flash::linear::kVectorTilings[number];
  SegmentStates const segments{summed.k_tile, summed.v_tile(), summed.k_tile / summed.warps_k,
                               (f.v_dim + summed.v_tile() - 1) / summed.v_tile()};
  launch_kernel<vector_gradients_kernel<C>>(
      launch, {grid.count(), C::kThreads, sizeof(VectorGradientsStorage<C>)}, p, grid, segments);
}

template <class Element, int kTiling = 0>
void launch_any_vector_gradients(VectorGradientsParams const& p, LaunchContext const& launch) {
  using flash::linear::Order;
  if constexpr (kTiling + 1 < flash::linear::kVectorGradientsTilingCount) {
    if (flash::linear::vector_gradients_number(p.walk.forward.k_dim, p.walk.forward.v_dim) !=
        kTiling) {
      launch_any_vector_gradients<Element, kTiling + 1>(p, launch);
      return;
    }
  }
  if (p.walk.forward.order == Order::Reverse) {
    launch_vector_gradient<VectorGradientsConfig<Element, kTiling, Order::Reverse>>(p, launch);
  } else {
    launch_vector_gradient<VectorGradientsConfig<Element, kTiling, Order::Forward>>(p, launch);
  }
}

}  // namespace flash::sm80::linear
