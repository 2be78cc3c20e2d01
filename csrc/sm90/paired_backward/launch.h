// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
#include "passes/backward/launch.h"
#include "sm90/backward/prepare.h"
#include "sm90/paired_backward/kernel.h"

namespace flash::sm90::backward {

template <class Config>
void launch_pairs(BwdParams const& params, LaunchContext const& launch, int resident) {
  static_assert(kPairedSmemBytes<Config> <= kMostSmem);  // the table counts only tiles
  auto const start = [&](BackwardArgs const& args, int64_t pairs) {
    launch_kernel<paired_backward_kernel<Config>>(
        launch,
        {pairs * Config::kPair, Config::kThreads, kPairedSmemBytes<Config>, Config::kPair,
         /*early=*/true},
        args);
  };
  launch_drawing<Config>(params, launch, resident, start);
}

template <class Config>
void launch_paired_backward(BwdParams const& params, LaunchContext const& launch) {
  int const pairs = launch.device.sm_count / Config::kPair;
  auto const main = [&] {
    if constexpr (Config::kScores == ScoreLevel::Plain) {
      if (params.kv_persistent.used()) {
        return launch_pairs<KvPersistentConfig<Config>>(params, launch,
                                                        params.kv_persistent.resident);
      }
      if (params.ordered_dq.used) {
        return launch_pairs<OrderedDqConfig<Config>>(params, launch, pairs);
      }
    }
    launch_pairs<Config>(params, launch, pairs);
  };
  launch_before<Config>(params, launch);
  main();
  launch_passes_behind<typename Config::Element>(params, query_tile<Config>(), launch);
  finish_cut_tiles<Config>(params, launch);
}

}  // namespace flash::sm90::backward
