// Stands in for csrc/launch/clusters.h.
#pragma once

#include "launch/launch_kernel.h"

namespace flash {

// The largest cluster of the device that the tests describe.
inline int largest_of_device = 16;

template <auto kKernel>
int largest_cluster(LaunchContext const&, LaunchShape shape) {
  return std::min(shape.cluster, largest_of_device);
}

template <auto kKernel>
int active_clusters(LaunchContext const& launch, LaunchShape const& shape) {
  return std::max(launch.device.sm_count / shape.cluster, 1);
}

}  // namespace flash
