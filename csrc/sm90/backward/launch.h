// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
#include "passes/backward/launch.h"
#include "sm90/backward/kernel.h"
#include "sm90/backward/prepare.h"

namespace flash::sm90::backward {

template <class Config>
void launch_tiles(BwdParams const& params, LaunchContext const& launch, int resident) {
  static_assert(kSmemBytes<Config> <= kMostSmem);  // the table counts only tiles
  auto const start = [&](BackwardArgs const& args, int64_t blocks) {
    launch_kernel<backward_kernel<Config>>(
        launch, {blocks, Config::kThreads, kSmemBytes<Config>, /*cluster=*/1, /*early=*/true},
        args);
  };
  launch_drawing<Config>(params, launch, resident, start);
}

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  int const places = launch.device.sm_count;
  auto const main = [&] {
    if constexpr (Config::kScores == ScoreLevel::Plain) {
      if (params.kv_persistent.used()) {
        return launch_tiles<KvPersistentConfig<Config>>(params, launch,
                                                        params.kv_persistent.resident);
      }
      if (params.ordered_dq.used) {
        return launch_tiles<OrderedDqConfig<Config>>(params, launch, places);
      }
    }
    launch_tiles<Config>(params, launch, places);
  };
  launch_before<Config>(params, launch);
  main();
  launch_passes_behind<typename Config::Element>(params, query_tile<Config>(), launch);
  finish_cut_tiles<Config>(params, launch);
}

}  // namespace flash::sm90::backward
