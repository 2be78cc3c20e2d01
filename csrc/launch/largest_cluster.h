// How many CTAs of a kernel this device runs as one cluster. The tests put a header of the same
// name before this one.
#pragma once

#include <array>
#include <atomic>

#include "launch/launch_kernel.h"

namespace flash {

// Whether the device holds one cluster of a kernel for which `allow` was called. `sure` becomes
// false if the query fails and so does not tell.
template <auto kKernel>
bool holds_cluster(LaunchShape const& shape, bool& sure) {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute = cluster_attribute(shape.cluster);
  config.gridDim.x = shape.cluster;
  config.blockDim.x = shape.threads;
  config.dynamicSmemBytes = shape.smem_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cudaError_t const error =
      cudaOccupancyMaxActiveClusters(&clusters, reinterpret_cast<void const*>(kKernel), &config);
  if (error != cudaSuccess) {
    cudaGetLastError();
    sure = sure && error == cudaErrorInvalidClusterSize;  // the device has no cluster of this size
  }
  return error == cudaSuccess && clusters > 0;
}

// The largest cluster up to shape.cluster, a power of two; 1: the device runs no clusters of this
// kernel. A part of a GPU may have fewer multiprocessors side by side than the whole, and code for
// older GPUs has no clusters. Queried once per kernel and device, with the first shape: all shapes
// of a kernel are alike.
template <auto kKernel>
int largest_cluster(LaunchContext const& launch, LaunchShape shape) {
  static std::array<std::atomic<int>, kMaxDevices> answers{};  // 0: not asked yet
  std::atomic<int>& answer = answers[launch.device.index];
  int largest = answer.load(std::memory_order_relaxed);
  if (largest > 0) {
    return largest;
  }
  if (!has_hopper_code<kKernel>(launch)) {
    shape.cluster = 1;
  }
  allow<kKernel>(launch, shape);
  bool sure = true;
  while (shape.cluster > 1 && !holds_cluster<kKernel>(shape, sure)) {
    shape.cluster /= 2;
  }
  if (sure) {
    answer.store(shape.cluster, std::memory_order_relaxed);
  }
  return shape.cluster;
}

}  // namespace flash
