#pragma once

#include <algorithm>

namespace flash::sm90::forward {

// A forward tile, as its row in the variant table has it.
struct ForwardTileShape {
  int head_dim;    // of Q and K
  int head_dim_v;  // of V and O
  int block_m;
  int block_n;
  int stages;
};

// Columns of O, in runs of 64, that shared memory has room for beside Q, K and V: 227 KiB, less
// barriers.
constexpr int staged_columns(ForwardTileShape const& tile) {
  constexpr int kRun = 64, kElements = (224 << 10) / 2;  // of 16 bits
  if (tile.head_dim_v % kRun != 0) {
    return 0;
  }
  int const room = kElements - tile.block_m * tile.head_dim -
                   tile.stages * tile.block_n * (tile.head_dim + tile.head_dim_v);
  return std::min(room / (tile.block_m * kRun) * kRun, tile.head_dim_v);
}

}  // namespace flash::sm90::forward
