#pragma once

#include "core/tile_grid.h"
#include "host/variant.h"
#include "params/fwd_params.h"
#include "sm90/forward/config.h"

namespace flash::sm90 {

// Row blocks, a tile each, in an order that keeps K and V of neighbours in L2.
template <class Config>
TileGrid forward_grid(FwdParams const& params, DeviceInfo const& device) {
  int64_t const kv_bytes = int64_t(params.seqlens.seqlen_k) *
                           (Config::kHeadDim + Config::kHeadDimV) *
                           sizeof(typename Config::Element);
  int64_t const columns = int64_t(params.heads_q) * params.seqlens.batch;
  // Half of L2: the rest is for Q, O and whatever else is on its way.
  TileOrder const order{
      l2_group(device.l2_bytes / 2, kv_bytes, params.heads_q / params.heads_kv, columns),
      params.mask.right >= 0};
  return make_tile_grid(params.seqlens, params.heads_q, Config::kBlockM, order);
}

}  // namespace flash::sm90
