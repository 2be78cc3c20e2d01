#pragma once

#include "core/tile_queue.h"
#include "passes/backward/passes.h"
#include "sm90/backward/score_mods.h"
#include "sm90/tensor_core.h"
#include "sm90/tensor_map.h"

namespace flash::sm90::backward {

// What a launch passes to the kernel.
struct BackwardArgs {
  TensorMap q;  // boxes of kBlockM rows
  TensorMap dout;
  TensorMap k;  // boxes of kBlockN keys
  TensorMap v;
  TensorMap delta_dout;  // for delta warps: boxes of kDeltaRows rows
  TensorMap delta_out;
  BwdParams params;
  TileGrid grid;
  TileQueue queue;
  NearTanhMod near_tanh;  // for a softcap
};

// dQ's sums: 64 rows after 64 rows, in the order of wgmma's accumulators; four numbers are added at
// once.
template <class Config>
constexpr QueryTile query_tile() {
  return {.block_m = Config::kBlockM,
          .head_dim = Config::kHeadDim,
          .threads = kWarpgroup,
          .row_warps = kWarpgroup / 32,
          .warp_columns = 0,
          .pair_columns = 16,
          .thread_stride = 4,
          .element_stride = 1,
          .tile_stride = kWarpgroupRows * Config::kHeadDim,
          .eight_stride = 4 * kWarpgroup,
          .unit_log2 = Config::kProbabilityLog2};
}

}  // namespace flash::sm90::backward
