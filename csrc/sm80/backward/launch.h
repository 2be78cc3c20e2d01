// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "launch/launch_kernel.h"
#include "passes/backward/passes.h"
#include "sm80/backward/kernel.h"

namespace flash::sm80 {

// dQ's sums in the order of its accumulators; a whole warp adds one number of each lane at once.
template <class Config>
constexpr QueryTile query_tile() {
  return {.block_m = Config::kBlockM,
          .head_dim = Config::kHeadDim,
          .threads = Config::kThreads,
          .row_warps = Config::kRowWarps,
          .warp_columns = 16,
          .pair_columns = 16 * Config::kWarps / Config::kRowWarps,
          .thread_stride = 1,
          .element_stride = Config::kThreads,
          .tile_stride = 4 * Config::kThreads,
          .eight_stride = 4 * Config::kThreads * (Config::kBlockM / (16 * Config::kRowWarps))};
}

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  using Element = typename Config::Element;
  constexpr QueryTile kTile = query_tile<Config>();
  Passes<Element>::preprocess(params, kTile, launch);
  TileGrid const grid = backward_grid(params, Config::kBlockN);
  launch_kernel<backward_kernel<Config>>(
      launch, {grid.num_tiles(), Config::kThreads, kSmemBytes<Config>}, params, grid);
  Passes<Element>::postprocess(params, kTile, launch);
}

}  // namespace flash::sm80
