// Stands in for csrc/launch/largest_cluster.h.
#pragma once

#include "launch/launch_kernel.h"

namespace flash {

// The largest cluster of the device that the tests describe.
inline int largest_of_device = 16;

template <auto kKernel>
int largest_cluster(LaunchContext const&, LaunchShape shape) {
  return std::min(shape.cluster, largest_of_device);
}

}  // namespace flash
