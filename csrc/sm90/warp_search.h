#pragma once

#include <cstdint>

namespace flash::sm90 {

// core/tile_scheduler.h's Bisection by all lanes of a warp: each round of loads leaves a 33rd of
// the candidates, so that one of 8,192 sequences is found in three rounds and not in thirteen.
struct WarpSearch {
  template <class IsBehind>
  __device__ int operator()(int count, IsBehind is_behind) const {
    constexpr int kLanes = 32;
    int const lane = static_cast<int>(threadIdx.x) % kLanes;
    int low = 0, high = count;  // low: not behind, high: behind
    while (high - low > 1) {
      int const step = (high - low + kLanes) / (kLanes + 1);
      int const candidate = low + step * (lane + 1);
      bool const behind = candidate >= high || is_behind(candidate);
      int const not_behind = kLanes - __popc(__ballot_sync(0xffffffffu, behind));
      high = min(high, low + step * (not_behind + 1));
      low += step * not_behind;
    }
    return low;
  }
};

}  // namespace flash::sm90
