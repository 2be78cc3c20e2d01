// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before whatever includes CuTe

#include <algorithm>

#include "backward/grid.h"
#include "backward/launch.h"
#include "host/launch_kernel.h"
#include "host/tile_counter.h"
#include "sm90/backward/kernel.h"
#include "sm90/backward/prepare.h"

namespace flash::sm90 {

template <class Config>
void launch_main(BwdParams const& params, LaunchContext const& launch) {
  TileGrid const grid = backward_grid<Config>(params, launch.device, turn_columns(launch.device));
  int64_t const num_tiles = grid.num_tiles();
  if (num_tiles == 0) {
    return;
  }
  check(num_tiles <= max_grid_blocks, num_tiles, " blocks of keys in one call, at most ",
        max_grid_blocks, " are served");
  // Who waits for turns waits for tiles before its own. Those are running if all tiles are drawn;
  // without a counter, if blocks of one tile each are launched in the tiles' order.
  bool const in_turns = params.workspace.turns != nullptr;
  int64_t const resident = std::min<int64_t>(num_tiles, launch.device.sm_count);
  int const counter =
      in_turns || num_tiles > resident ? tile_counter(launch.stream, kTileCounters) : -1;
  int64_t const blocks = in_turns && counter < 0 ? num_tiles : resident;
  BackwardArgs args = backward_args<Config>(params, grid);
  args.queue = {static_cast<uint32_t>(num_tiles), counter >= 0, in_turns && counter >= 0};
  args.counter = counter;
  launch_kernel<backward_kernel<Config>>(launch, {blocks, Config::kThreads, kSmemBytes<Config>},
                                         args);
}

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  launch_with_passes<typename Config::Element>(params, query_tile<Config>(), launch,
                                               [&] { launch_main<Config>(params, launch); });
}

}  // namespace flash::sm90
