#pragma once

#include "passes/backward/passes.h"
#include "sm90/tensor_core.h"

namespace flash::sm90::backward {

// dQ's sums: 64 rows after 64 rows, in the order of wgmma's accumulators; four numbers are added at
// once.
template <class Config>
constexpr QueryTile query_tile() {
  return {.block_m = Config::kBlockM,
          .head_dim = Config::kHeadDim,
          .threads = kWarpgroup,
          .row_warps = kWarpgroup / 32,
          .warp_columns = 0,
          .group_columns = 16,
          .thread_stride = 4,
          .element_stride = 1,
          .tile_stride = kWarpgroupRows * Config::kHeadDim,
          .group_stride = 4 * kWarpgroup,
          .unit_log2 = Config::kProbabilityLog2};
}

}  // namespace flash::sm90::backward
