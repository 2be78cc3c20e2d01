// The order in which the tiles of a launch run: what neighbours read stays in L2, and what takes
// longest does not come last.
#pragma once

#include <algorithm>

#include "core/tile_grid.h"
#include "host/variant.h"
#include "params/fwd_params.h"

namespace flash {

// What a column's tiles have in common: K and V of a forward, Q, dO and dQ of a backward.
struct Columns {
  int64_t count;
  int64_t bytes;     // that the tiles of a column read
  int sharing;       // neighbouring columns that read the same bytes
  bool equal_tiles;  // all tiles of a column take the same time
};

// Columns to run side by side: those that fit half of L2; the rest is for what is on its way. Tiles
// of unequal length even out inside a group only, so there a group is wide: as many columns as leave
// each of them four tiles at a time. Tiles that start together read together, and what four share
// takes a quarter of what L2 hands out from memory, which is no limit.
inline int columns_side_by_side(DeviceInfo const& device, Columns const& columns) {
  constexpr int kSharers = 4;
  int group = l2_group(device.l2_bytes / 2, columns.bytes, columns.sharing, columns.count);
  if (!columns.equal_tiles) {
    group = std::max<int>(group, std::min<int64_t>(columns.count, device.sm_count / kSharers));
  }
  return even_group(group, columns.count);
}

// Of a forward: a tile per row block, a column per query head and batch entry.
template <class Config>
TileGrid forward_grid(FwdParams const& params, DeviceInfo const& device) {
  int64_t const row_bytes =
      (Config::kHeadDim + Config::kHeadDimV) * int64_t(sizeof(typename Config::Element));
  bool const causal = params.mask.right >= 0;
  Columns const columns{int64_t(params.heads_q) * params.seqlens.batch,
                        params.seqlens.seqlen_k * row_bytes,
                        params.heads_q / std::max(params.heads_kv, 1), !causal};
  // Causal: the last row block sees most keys.
  TileOrder const order{columns_side_by_side(device, columns), /*longest_first=*/causal};
  return make_tile_grid(params.seqlens, params.heads_q, Config::kBlockM, order);
}

}  // namespace flash
