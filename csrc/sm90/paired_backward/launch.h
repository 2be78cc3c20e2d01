// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/clusters.h"
#include "sm90/backward/launch_setup.h"
#include "sm90/paired_backward/kernel.h"

namespace flash::sm90::backward {

template <class Config>
LaunchShape paired_shape(int64_t clusters) {
  static_assert(kPairedSmemBytes<Config> <= kMostSmem);  // the table counts only tiles
  return {clusters * Config::kCluster, Config::kThreads, kPairedSmemBytes<Config>, Config::kCluster,
          /*early=*/true};
}

template <class Config>
void launch_paired_backward(BwdParams const& params, LaunchContext const& launch) {
  // Where fewer SMs are left than a cluster has CTAs, it takes more.
  int resident = std::max(launch.device.sm_count / Config::kCluster, 1);
  if constexpr (Config::kSplitsColumns) {
    resident = std::min(
        resident, active_clusters<paired_backward_kernel<Config>>(launch, paired_shape<Config>(1)));
  }
  launch_schedule<Config>(params, launch, resident,
                          [&]<class Schedule>(std::type_identity<Schedule>,
                                              BackwardArgs const& args, int64_t clusters) {
                            launch_kernel<paired_backward_kernel<Schedule>>(
                                launch, paired_shape<Schedule>(clusters), args);
                          });
}

}  // namespace flash::sm90::backward
