#pragma once

namespace flash {

// Thread blocks of a cluster that has a tile of decoding, at most: 16 are more than every GPU is
// sure to have, and what Hopper's have.
constexpr int kMostClusterLog2 = 4;

}  // namespace flash
