// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
#include "sm90/backward/kernel.h"
#include "sm90/backward/launch_setup.h"

namespace flash::sm90::backward {

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  launch_schedule<Config>(
      params, launch, launch.device.sm_count,
      [&]<class Schedule>(std::type_identity<Schedule>, BackwardArgs const& args, int64_t blocks) {
        static_assert(kSmemBytes<Schedule> <= kMostSmem);  // the table counts only tiles
        launch_kernel<backward_kernel<Schedule>>(
            launch,
            {blocks, Schedule::kThreads, kSmemBytes<Schedule>, /*cluster=*/1, /*early=*/true},
            args);
      });
}

}  // namespace flash::sm90::backward
