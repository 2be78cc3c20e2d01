// Launches one instantiation; included by the generated files only.
#pragma once

#include "passes/max_logits/launch.h"
#include "sm80/forward/kernel.h"

namespace flash::sm80 {

template <class Config>
void launch_forward(FwdParams const& params, LaunchContext const& launch) {
  if constexpr (Config::kScores != ScoreLevel::Plain) {  // others keep none
    start_max_logits<Config>(params, launch);
  }
  TileGrid const grid = make_tile_grid(params.seqlens, params.heads_q, Config::kBlockM,
                                       {params.side_by_side, params.longest_first});
  launch_kernel<forward_kernel<Config>>(
      launch, {grid.num_tiles(), Config::kThreads, kSmemBytes<Config>}, params, grid);
}

}  // namespace flash::sm80
