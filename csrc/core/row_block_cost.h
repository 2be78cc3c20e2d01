// What a row block of Hopper's forward costs, by the keys of a tile: which of two tiles is faster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/block_range.h"
#include "core/work_tile.h"

namespace flash {

// A tile of Hopper's forward, as its row in the variant table has it.
struct KeyTile {
  int head_dim;    // of Q and K
  int head_dim_v;  // of V and O
  int block_m;
  int block_n;
  int stages;

  constexpr KeyTile with(int keys) const { return {head_dim, head_dim_v, block_m, keys, stages}; }
};

// Columns of O, runs of 64, that shared memory has room for beside Q, K and V: 227 KiB, less
// barriers.
constexpr int staged_columns(KeyTile const& tile) {
  constexpr int kRun = 64, kElements = (224 << 10) / 2;  // of 16 bits
  if (tile.head_dim_v % kRun != 0) {
    return 0;
  }
  int const room = kElements - tile.block_m * tile.head_dim -
                   tile.stages * tile.block_n * (tile.head_dim + tile.head_dim_v);
  return std::min(room / (tile.block_m * kRun) * kRun, tile.head_dim_v);
}

// A step takes as long as so many keys more than its tile has.
constexpr double kStepKeys = 28;

// In the time of so many keys. What begins and ends a row block takes as long as a step: on an H200
// that told of 96, 112, 128 and 176 keys, d 128 and 192, 512 to 16k keys, which takes how much
// less, within 2%. A column of O that goes out from registers takes as long as a quarter of a key:
// without, d 192 lost 1% at 512 keys. So does one that waits for another's room (kStoresLate):
// without, d 256 took 64 keys at 1k, and lost 0.7%.
inline double row_block_cost(double steps, KeyTile const& tile) {
  constexpr double kColumnKeys = 0.25;
  return (steps + 1) * (tile.block_n + kStepKeys) +
         (tile.head_dim_v - staged_columns(tile)) * kColumnKeys;
}

// Tiles of keys that a row block of a sequence goes through. The mean of all; of many, of a few
// from the first to the last: a call is to wait for no more.
inline double mean_steps(SequenceMask const& mask, int seqlen_q, int block_m, int block_n) {
  constexpr int kMost = 8;
  int const blocks = num_m_blocks(seqlen_q, block_m);
  int const samples = std::min(blocks, kMost);
  int64_t steps = 0;
  for (int i = 0; i < samples; ++i) {
    int const block = samples < kMost ? i : static_cast<int>(int64_t(blocks - 1) * i / (kMost - 1));
    int const row = block * block_m;
    int const row_end = row + std::min(block_m, seqlen_q - row);
    steps += block_range(mask, row, row_end, block_n).count();
  }
  return samples > 0 ? double(steps) / samples : 0;
}

}  // namespace flash
