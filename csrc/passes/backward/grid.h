#pragma once

#include <algorithm>

#include "core/tile_grid.h"
#include "params/bwd_params.h"

namespace flash {

// A tile per KV block and GQA split. The first KV blocks come first: most rows see them under a
// causal mask, and later ones wait for them at dQ semaphores.
inline TileGrid backward_grid(BwdParams const& params, int block_n) {
  return make_key_tile_grid(params.seqlens, params.heads_kv * params.gqa.splits, block_n,
                            {std::max(params.side_by_side, 1), /*longest_first=*/false});
}

}  // namespace flash
