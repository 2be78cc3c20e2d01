// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "host/launch_kernel.h"
#include "sm80/backward/grid.h"
#include "sm80/backward/kernel.h"
#include "sm80/backward/passes.h"

namespace flash::sm80 {

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  using Element = typename Config::Element;
  constexpr QueryTile tile{Config::kBlockM, Config::kHeadDim, Config::kThreads, Config::kRowWarps};
  launch_preprocess<Element>(params, tile, launch);
  TileGrid const grid = backward_grid<Config>(params, launch.device);
  launch_kernel<backward_kernel<Config>>(
      launch, {grid.num_tiles(), Config::kThreads, kSmemBytes<Config>}, params, grid);
  if (params.dq.ptr && params.workspace.dq) {
    launch_query_gradient<Element>(params, tile, launch);
  }
  if (params.ds_aux) {
    launch_sink_gradient(params, launch);
  }
}

}  // namespace flash::sm80
