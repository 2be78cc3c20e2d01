// The launches of one dtype, by the tiling of the call.
#pragma once

#include "sm80/linear/launch.h"

namespace flash::sm80::linear {

// use(number) with the number of the call's tiling, as a constant.
template <int kTiling = 0, class Use>
void by_tiling(ForwardParams const& p, Use use) {
  constexpr flash::linear::Tiling tiling = flash::linear::kTilings[kTiling];
  if constexpr (!tiling.tiled) {
    if (flash::linear::tiling_number(p.k_dim) != kTiling) {
      by_tiling<kTiling + 1>(p, use);
      return;
    }
  }
  use(std::integral_constant<int, kTiling>{});
}

// Where there is no tiling to walk.
template <class Element>
void launch_any(ForwardParams const& p, LaunchContext const& launch) {
  launch_tiled<Element, std::size(flash::linear::kTilings) - 1>(p, launch);
}

template <class Element>
void launch_any_states(ForwardParams const& p, LaunchContext const& launch) {
  by_tiling(p, [&](auto tiling) { launch_states<Element, tiling()>(p, launch); });
}

}  // namespace flash::sm80::linear
