#include "launch/device.h"

#include <array>
#include <mutex>

#include "launch/error.h"
#include "launch/sm_margin.h"

namespace flash {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  FLASH_CHECK_CUDA(cudaDeviceGetAttribute(&value, which, device), "device query");
  return value;
}

// From the memory clock in kHz, with two transfers a clock, and the bus width in bits.
float memory_rate(int device) {
  float const clock = float(attribute(cudaDevAttrMemoryClockRate, device));
  return clock * 1e-3f * 2 * float(attribute(cudaDevAttrGlobalMemoryBusWidth, device)) / 8;
}

DeviceInfo query(int device) {
  return {device,
          10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
              attribute(cudaDevAttrComputeCapabilityMinor, device),
          attribute(cudaDevAttrL2CacheSize, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrMultiProcessorCount, device),
          memory_rate(device)};
}

}  // namespace

// As the call at hand may see it (sm_margin.h).
DeviceInfo const& current_device() {
  static std::array<DeviceInfo, kMaxDevices> info;
  static std::array<std::once_flag, kMaxDevices> known;
  int device = 0;
  FLASH_CHECK_CUDA(cudaGetDevice(&device), "device query");
  check(device < kMaxDevices, "device index ", device, ", at most ", kMaxDevices - 1, " is served");
  std::call_once(known[device], [&] { info[device] = query(device); });
  return without_margin(info[device]);
}

}  // namespace flash
