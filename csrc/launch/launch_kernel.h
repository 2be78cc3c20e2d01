// The only place that starts a kernel. The tests put a header of the same name before this one that
// runs the CTAs on the host.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "core/tile_numbers.h"
#include "launch/device.h"
#include "launch/error.h"

namespace flash {

struct LaunchShape {
  int64_t blocks;
  int threads;
  int smem_bytes;
  int cluster = 1;     // neighbouring CTAs that run together and reach each other's shared memory
  bool early = false;  // may start before the stream's last launch ends (core/early_launch.h)
};

// More than 48 KiB of shared memory has to be requested per kernel and device. This is done when a
// launch needs more than any before, not at each call.
template <auto kKernel>
void allow_shared_memory(LaunchContext const& launch, int bytes) {
  static std::array<std::atomic<int>, kMaxDevices> allowed{};
  static std::mutex asking;
  std::atomic<int>& most = allowed[launch.device.index];
  if (bytes <= most.load(std::memory_order_acquire)) {
    return;
  }
  std::scoped_lock const lock(asking);
  if (bytes > most.load(std::memory_order_relaxed)) {
    FLASH_CHECK_CUDA(cudaFuncSetAttribute(reinterpret_cast<void const*>(kKernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                     launch.name);
    most.store(bytes, std::memory_order_release);
  }
}

// Every GPU with clusters has these. Larger ones have to be allowed, which may fail on GPUs that
// lack them.
constexpr int kLargestPortableCluster = 8;

template <auto kKernel>
void allow_large_clusters(LaunchContext const& launch) {
  static std::array<std::atomic<bool>, kMaxDevices> allowed{};
  std::atomic<bool>& done = allowed[launch.device.index];
  if (!done.load(std::memory_order_acquire)) {
    FLASH_CHECK_CUDA(cudaFuncSetAttribute(reinterpret_cast<void const*>(kKernel),
                                          cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                     launch.name);
    done.store(true, std::memory_order_release);
  }
}

template <auto kKernel>
void allow(LaunchContext const& launch, LaunchShape const& shape) {
  constexpr int kAlwaysAllowed = 48 * 1024;
  if (shape.smem_bytes > kAlwaysAllowed) {
    allow_shared_memory<kKernel>(launch, shape.smem_bytes);
  }
  if (shape.cluster > kLargestPortableCluster) {
    allow_large_clusters<kKernel>(launch);
  }
}

inline cudaLaunchAttribute cluster_attribute(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  return attribute;
}

// Whether a kernel's code has the instructions of core/early_launch.h and core/cluster.h. Code made
// from an older virtual architecture's PTX lacks them on every GPU.
template <auto kKernel>
bool has_hopper_code(LaunchContext const& launch) {
  constexpr int kHopper = 90;
  static std::array<std::atomic<int>, kMaxDevices> versions{};
  std::atomic<int>& version = versions[launch.device.index];
  if (version.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes attributes{};
    FLASH_CHECK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kKernel)),
                     launch.name);
    version.store(attributes.ptxVersion, std::memory_order_relaxed);
  }
  return launch.device.sm >= kHopper && version.load(std::memory_order_relaxed) >= kHopper;
}

template <auto kKernel, class... Args>
void launch_kernel(LaunchContext const& launch, LaunchShape shape, Args const&... args) {
  if (shape.blocks == 0) {
    return;
  }
  check(shape.blocks <= max_grid_blocks, shape.blocks, " CTAs in one call, at most ",
        max_grid_blocks, " are served");
  allow<kKernel>(launch, shape);
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(shape.blocks);
  config.blockDim.x = shape.threads;
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = launch.stream;
  std::array<cudaLaunchAttribute, 2> attributes{};
  config.attrs = attributes.data();
  if (shape.cluster > 1) {
    attributes[config.numAttrs++] = cluster_attribute(shape.cluster);
  }
  if (shape.early && has_hopper_code<kKernel>(launch)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  FLASH_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, args...), launch.name);
}

}  // namespace flash
