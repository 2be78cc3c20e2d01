#pragma once

#include "host/tile_order.h"
#include "params/bwd_params.h"

namespace flash {

// A tile per block of keys and part of a KV head's group. The first key blocks come first: they are
// those that most rows see under a causal mask, and in turns the later ones wait for them.
// turn_columns: so many at least run side by side in a deterministic call that is no relay, where
// neighbours that add to the same sums queue for their turns.
template <class Config>
TileGrid backward_grid(BwdParams const& params, DeviceInfo const& device, TileTakers const& takers,
                       int turn_columns) {
  int const heads = params.heads_kv * params.group.parts;
  // What all key blocks of a part share: Q, dO and the sums of dQ.
  int64_t const row_bytes =
      (Config::kHeadDim + Config::kHeadDimV) * sizeof(typename Config::Element) +
      Config::kHeadDim * sizeof(float);
  Columns const columns{
      int64_t(heads) * params.seqlens.batch,
      params.seqlens.seqlen_q * row_bytes * params.group.part_heads, 1,
      num_m_blocks(params.seqlens.seqlen_k, Config::kBlockN),
      !limits(params.mask.left, params.seqlens) && !limits(params.mask.right, params.seqlens)};
  int group = columns_side_by_side(device.l2_bytes, takers, columns);
  if (params.relay.used) {
    group = waiting_columns_side_by_side(device.l2_bytes, takers, columns);
  } else if (params.workspace.turns) {
    int const wide = static_cast<int>(std::min<int64_t>(columns.count, turn_columns));
    group = std::max(group, even_group(std::max(wide, 1), columns.count));
  }
  return make_key_tile_grid(params.seqlens, heads, Config::kBlockN,
                            {group, /*longest_first=*/false});
}

}  // namespace flash
