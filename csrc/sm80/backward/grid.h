#pragma once

#include <algorithm>

#include "core/tile_grid.h"
#include "host/variant.h"
#include "params/bwd_params.h"
#include "sm80/backward/config.h"

namespace flash::sm80 {

// One thread block per block of keys and KV head. The first key blocks come first: they are those
// that most rows see under a causal mask, and in a deterministic call the later ones wait for them.
template <class Config>
TileGrid backward_grid(BwdParams const& params, DeviceInfo const& device) {
  int64_t const heads_per_kv = params.heads_q / std::max(params.heads_kv, 1);
  // What all key blocks of a KV head share: Q, dO and the sums of dQ.
  int64_t const row_bytes =
      (Config::kHeadDim + Config::kHeadDimV) * sizeof(typename Config::Element) +
      Config::kHeadDim * sizeof(float);
  int64_t const bytes = params.seqlens.seqlen_q * row_bytes * heads_per_kv;
  int64_t const columns = int64_t(params.heads_kv) * params.seqlens.batch;
  int group = l2_group(device.l2_bytes / 2, bytes, 1, columns);
  if (params.workspace.turns) {
    // Neighbours add to different sums, or they would queue for their turns.
    group = static_cast<int>(std::max<int64_t>(group, std::min<int64_t>(columns, device.sm_count)));
  }
  return make_key_tile_grid(params.seqlens, params.heads_kv, Config::kBlockN,
                            {group, /*longest_first=*/false});
}

}  // namespace flash::sm80
