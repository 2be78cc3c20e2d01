// How many CTAs of a kernel this device runs as one cluster, and how many clusters at a time. The
// tests put a header of the same name before this one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "launch/launch_kernel.h"

namespace flash {

// How many clusters of the kernel the device can hold at once. `allow<kKernel>` must have been
// called. `sure` becomes false if the query fails and so does not tell.
template <auto kKernel>
int held_clusters(LaunchShape const& shape, bool& sure) {
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
    return 0;
  }
  return clusters;
}

// The clusters of a kernel that run at a time, at least 1. The parts of a GPU may have no multiple
// of a cluster's SMs: an H200 with 132 of them holds 30 clusters of four. Queried once
// per kernel and device, with the first shape: all shapes of a kernel are alike.
template <auto kKernel>
int active_clusters(LaunchContext const& launch, LaunchShape const& shape) {
  static std::array<std::atomic<int>, kMaxDevices> answers{};  // 0: not asked yet
  std::atomic<int>& answer = answers[launch.device.index];
  if (int const known = answer.load(std::memory_order_relaxed)) {
    return known;
  }
  allow<kKernel>(launch, shape);
  bool sure = true;
  int const held = held_clusters<kKernel>(shape, sure);
  if (!sure || held == 0) {  // then the launch says why
    return plan::clusters_at_a_time(launch.device.sm_count, shape.cluster);
  }
  answer.store(held, std::memory_order_relaxed);
  return held;
}

// The largest cluster up to shape.cluster, a power of two; 1: the device runs no clusters of this
// kernel. A part of a GPU may have fewer SMs side by side than the whole, and code for
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
  while (shape.cluster > 1 && held_clusters<kKernel>(shape, sure) == 0) {
    shape.cluster /= 2;
  }
  if (sure) {
    answer.store(shape.cluster, std::memory_order_relaxed);
  }
  return shape.cluster;
}

}  // namespace flash
