// Launches one instantiation; included by the generated files only.
#pragma once

#include <array>
#include <mutex>

#include "host/device.h"
#include "host/error.h"
#include "host/variant.h"
#include "sm80/forward.h"
#include "sm80/forward_grid.h"

namespace flash::sm80 {

// More shared memory than 48 KiB has to be asked for: once per kernel and device, not per call.
template <class Config>
void allow_shared_memory(DeviceInfo const& device, char const* name) {
  static std::array<std::once_flag, kMaxDevices> allowed;
  std::call_once(allowed[device.index], [&] {
    FLASH_CHECK_CUDA(
        cudaFuncSetAttribute(forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSmemBytes<Config>),
        name);
  });
}

template <class Config>
void launch_forward(FwdParams const& params, DeviceInfo const& device, cudaStream_t stream,
                    char const* name) {
  TileGrid const grid = forward_grid<Config>(params, device);
  int64_t const tiles = grid.num_tiles();
  if (tiles == 0) {
    return;
  }
  check(tiles <= max_grid_blocks, tiles, " row blocks in one call, at most ", max_grid_blocks,
        " are served");
  allow_shared_memory<Config>(device, name);
  forward_kernel<Config>
      <<<static_cast<unsigned>(tiles), Config::kThreads, kSmemBytes<Config>, stream>>>(params,
                                                                                       grid);
  FLASH_CHECK_CUDA(cudaGetLastError(), name);
}

}  // namespace flash::sm80
