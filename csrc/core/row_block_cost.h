// What a row block of Hopper's forward costs, by the keys of a tile: which of two tiles is faster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/block_range.h"
#include "core/work_tile.h"

namespace flash {

// In the time of so many keys. A step takes as long as 28 keys more than its tile has, and what
// begins and ends a row block as long as a step: on an H200 that told of 96, 112, 128 and 176 keys,
// d 128 and 192, 512 to 16k keys, which takes how much less, within 2%.
inline double row_block_cost(double steps, int block_n) {
  constexpr double kStepKeys = 28;
  return (steps + 1) * (block_n + kStepKeys);
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
