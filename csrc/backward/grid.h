#pragma once

#include "host/tile_order.h"
#include "params/bwd_params.h"

namespace flash {

// A tile per block of keys and KV head. The first key blocks come first: they are those
// that most rows see under a causal mask, and in a deterministic call the later ones wait for them.
template <class Config>
TileGrid backward_grid(BwdParams const& params, DeviceInfo const& device) {
  int64_t const heads_per_kv = params.heads_q / std::max(params.heads_kv, 1);
  // What all key blocks of a KV head share: Q, dO and the sums of dQ.
  int64_t const row_bytes =
      (Config::kHeadDim + Config::kHeadDimV) * sizeof(typename Config::Element) +
      Config::kHeadDim * sizeof(float);
  Columns const columns{
      int64_t(params.heads_kv) * params.seqlens.batch,
      params.seqlens.seqlen_q * row_bytes * heads_per_kv, 1,
      num_m_blocks(params.seqlens.seqlen_k, Config::kBlockN),
      !limits(params.mask.left, params.seqlens) && !limits(params.mask.right, params.seqlens)};
  int group = columns_side_by_side(device, columns);
  if (params.workspace.turns) {
    // Neighbours add to different sums, or they would queue for their turns.
    group = std::max<int>(group, std::min<int64_t>(columns.count, device.sm_count));
  }
  return make_key_tile_grid(params.seqlens, params.heads_kv, Config::kBlockN,
                            {group, /*longest_first=*/false});
}

}  // namespace flash
