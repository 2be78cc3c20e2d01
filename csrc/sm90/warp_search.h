#pragma once

#include "core/tile_scheduler.h"

namespace flash::sm90 {

// core/tile_scheduler.h's Bisection by all lanes of a warp: each round of loads leaves a 33rd of
// the candidates, so that one of 8,192 sequences is found in three rounds and not in thirteen. The
// search ends even where starts decrease, but then it may miss row blocks: a kernel whose CTAs wait
// for earlier row blocks has to use Bisection.
struct WarpSearch {
  // Result of the last search, if this one cannot find less: with many short sequences the new
  // result is one of the next few, which one round tells.
  int from = 0;

  template <class Rows, class IsBehind>
  __device__ SequencePlace operator()(int count, Rows const& rows, IsBehind is_behind) const {
    constexpr int kLanes = 32;
    int const lane = static_cast<int>(threadIdx.x) % kLanes;
    int low = from, high = count;  // `low` is not behind, `high` is
    bool near = low > 0;
    while (high - low > 1) {
      int const step = near ? 1 : (high - low + kLanes) / (kLanes + 1);
      near = false;
      int const candidate = low + step * (lane + 1);
      bool const behind = candidate >= high || is_behind(candidate, rows.start(candidate));
      int const not_behind = kLanes - __popc(__ballot_sync(0xffffffffu, behind));
      high = not_behind < kLanes ? min(high, low + step * (not_behind + 1)) : high;
      low += step * not_behind;
    }
    return {low, rows.start(low), rows.start(low + 1)};
  }
};

}  // namespace flash::sm90
