// Launches one instantiation; included by the generated files only.
#pragma once

#include "host/launch_kernel.h"
#include "host/tile_order.h"
#include "sm80/forward/kernel.h"

namespace flash::sm80 {

template <class Config>
void launch_forward(FwdParams const& params, LaunchContext const& launch) {
  TileGrid const grid = forward_grid<Config>(
      params, launch.device, {Config::kBlockM, params.heads_q}, {launch.device.sm_count});
  launch_kernel<forward_kernel<Config>>(
      launch, {grid.num_tiles(), Config::kThreads, kSmemBytes<Config>}, params, grid);
}

}  // namespace flash::sm80
