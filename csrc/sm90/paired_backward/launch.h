// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before whatever includes CuTe

#include "backward/grid.h"
#include "backward/launch.h"
#include "host/launch_kernel.h"
#include "sm90/backward/prepare.h"
#include "sm90/paired_backward/kernel.h"

namespace flash::sm90 {

template <class Config>
void launch_paired_backward(BwdParams const& params, LaunchContext const& launch) {
  auto const main = [&] {
    TileGrid const grid = backward_grid<Config>(params, launch.device, turn_columns(launch.device));
    int64_t const num_tiles = grid.num_tiles();
    if (num_tiles == 0) {
      return;
    }
    BackwardArgs const args = backward_args<Config>(params, grid);
    launch_kernel<paired_backward_kernel<Config>>(
        launch,
        {num_tiles * Config::kPair, Config::kThreads, kPairedSmemBytes<Config>, Config::kPair},
        args);
  };
  launch_with_passes<typename Config::Element>(params, query_tile<Config>(), launch, main);
}

}  // namespace flash::sm90
