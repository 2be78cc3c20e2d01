// The order in which the tiles of a launch run: what neighbours read stays in L2, and what takes
// longest does not come last.
#pragma once

#include "core/tile_columns.h"
#include "core/tile_grid.h"
#include "host/variant.h"
#include "params/fwd_params.h"

namespace flash {

// What a tile of a forward is: block_m queries of one of `heads`, which are the query heads, or KV
// heads with all of their query heads at once.
struct ForwardTile {
  int block_m;
  int heads;
};

// Whether a limit of the mask is nearer than the length of a sequence. By the lengths that the
// caller says, which do for an order of tiles.
inline bool limits(int width, Seqlens const& s) {
  return width >= 0 && width < int64_t(s.seqlen_q) + s.seqlen_k;
}

// Of a forward: a tile per row block, a column per head and batch entry.
template <class Config>
TileGrid forward_grid(FwdParams const& params, DeviceInfo const& device, ForwardTile const& tile,
                      TileTakers const& takers) {
  int64_t const row_bytes =
      (Config::kHeadDim + Config::kHeadDimV) * int64_t(sizeof(typename Config::Element));
  bool const causal = limits(params.mask.right, params.seqlens);
  // Beside decode, memory is what all wait for: those that read the same keys read them together.
  if (params.seqlens.few_q > 0) {
    return make_tile_grid(params.seqlens, tile.heads, tile.block_m, {/*group=*/1, causal});
  }
  Columns const columns{int64_t(tile.heads) * params.seqlens.batch,
                        params.seqlens.seqlen_k * row_bytes,
                        tile.heads / std::max(params.heads_kv, 1),
                        num_m_blocks(params.seqlens.seqlen_q, tile.block_m), !causal};
  // Causal: the last row block sees most keys.
  TileOrder const order{columns_side_by_side(device.l2_bytes, takers, columns),
                        /*longest_first=*/causal};
  return make_tile_grid(params.seqlens, tile.heads, tile.block_m, order);
}

}  // namespace flash
