// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
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
  launch_schedule<Config>(params, launch, launch.device.sm_count,
                          [&]<class Schedule>(Schedule, int resident) {
                            launch_tiles<typename Schedule::type>(params, launch, resident);
                          });
}

}  // namespace flash::sm90::backward
