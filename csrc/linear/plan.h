// How a call of linear attention is divided: a pure function of K and V.
#pragma once

#include "params/common.h"

namespace flash::linear {

// Columns of the tiles of Q and K, the tokens of a chunk, and whether K has several tiles.
struct Plan {
  int k_tile;
  int v_tile;
  int chunk;
  int heads;  // of a CTA
  bool tiled;
};

constexpr Plan kPlans[] = {
    {16, 32, 128, 4, false},   {32, 64, 128, 2, false}, {64, 128, 128, 1, false},
    {128, 128, 128, 1, false}, {64, 128, 128, 1, true},
};

constexpr Plan plan_of(int k_dim) {
  for (Plan const& plan : kPlans) {
    if (k_dim <= plan.k_tile || plan.tiled) {
      return plan;
    }
  }
  return {};
}

// Chunks of a sequence.
FLASH_HD int chunks_of(int tokens, int chunk) { return (tokens + chunk - 1) / chunk; }

// Slots that are enough whatever the sequences' lengths: sequence n begins at slot
// cu[n] / chunk + n, because it has at most (cu[n + 1] - cu[n]) / chunk + 1 chunks.
FLASH_HD int most_slots(bool varlen, int count, int tokens, int chunk) {
  return varlen ? tokens / chunk + count : count * chunks_of(tokens, chunk);
}

}  // namespace flash::linear
