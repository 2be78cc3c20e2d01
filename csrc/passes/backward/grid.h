#pragma once

#include <algorithm>

#include "core/tile_grid.h"
#include "params/bwd_params.h"

namespace flash {

// A tile per block of keys and part of a KV head's group. The first key blocks come first: they are
// those that most rows see under a causal mask, and in turns the later ones wait for them.
inline TileGrid backward_grid(BwdParams const& params, int block_n) {
  return make_key_tile_grid(params.seqlens, params.heads_kv * params.gqa.splits, block_n,
                            {std::max(params.side_by_side, 1), /*longest_first=*/false});
}

}  // namespace flash
