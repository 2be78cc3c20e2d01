// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/launch_kernel.h"
#include "sm90/backward/prepare.h"
#include "sm90/paired_backward/kernel.h"

namespace flash::sm90::backward {

template <class Config>
void launch_paired_backward(BwdParams const& params, LaunchContext const& launch) {
  launch_schedule<Config>(
      params, launch,
      [&]<class Schedule>(std::type_identity<Schedule>, BackwardArgs const& args, int64_t pairs) {
        static_assert(kPairedSmemBytes<Schedule> <= kMostSmem);  // the table counts only tiles
        launch_kernel<paired_backward_kernel<Schedule>>(
            launch,
            {pairs * Schedule::kPair, Schedule::kThreads, kPairedSmemBytes<Schedule>,
             Schedule::kPair, /*early=*/true},
            args);
      });
}

}  // namespace flash::sm90::backward
