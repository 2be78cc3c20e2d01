#pragma once

#include <algorithm>

namespace flash {

// The largest head dim at which one warp of decoding, or one warpgroup of Hopper's forward, has
// registers for all columns of O.
constexpr int kMostNarrowHeadDim = 256;

// Whether these head dims are wider. Then warps share keys (csrc/wide), a pair of CTAs K and V
// (csrc/sm90/paired_forward), and two pairs the columns of a backward (csrc/sm90/paired_backward).
constexpr bool is_wide(int head_dim, int head_dim_v) {
  return std::max(head_dim, head_dim_v) > kMostNarrowHeadDim;
}

}  // namespace flash
