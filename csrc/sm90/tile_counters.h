// The counters from which CTAs draw their tiles.
#pragma once

#include "launch/counters.h"

namespace flash::sm90 {

constexpr int kTileCounters = 1 << 14;
__device__ static uint32_t tile_counters[kTileCounters];

// The counters of this file's kernels: `static`, as the array is.
static inline Counters& counters() {
  static Counters own(tile_counters);
  return own;
}

}  // namespace flash::sm90
