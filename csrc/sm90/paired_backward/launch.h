// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
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
  launch_schedule<Config>(params, launch, launch.device.sm_count / Config::kPair,
                          [&]<class Schedule>(Schedule, int resident) {
                            launch_pairs<typename Schedule::type>(params, launch, resident);
                          });
}

}  // namespace flash::sm90::backward
