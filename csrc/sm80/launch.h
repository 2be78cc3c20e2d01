// Launches one instantiation; included by the generated files only.
#pragma once

#include "host/error.h"
#include "host/variant.h"
#include "sm80/forward.h"
#include "sm80/forward_grid.h"

namespace flash::sm80 {

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
  auto* const kernel = forward_kernel<Config>;
  FLASH_CHECK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes<Config>),
      name);
  kernel<<<static_cast<unsigned>(tiles), Config::kThreads, kSmemBytes<Config>, stream>>>(params,
                                                                                         grid);
  FLASH_CHECK_CUDA(cudaGetLastError(), name);
}

}  // namespace flash::sm80
