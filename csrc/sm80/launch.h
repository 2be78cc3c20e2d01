// Launches one instantiation; included by the generated files only.
#pragma once

#include "host/error.h"
#include "host/variant.h"
#include "sm80/forward.h"

namespace flash::sm80 {

template <class Config>
void launch_forward(FwdParams const& params, DeviceInfo const& device, cudaStream_t stream,
                    char const* name) {
  int64_t const kv_bytes =
      int64_t(params.seqlens.seqlen_k) * 2 * Config::kHeadDim * sizeof(typename Config::Element);
  int64_t const columns = int64_t(params.heads_q) * params.seqlens.batch;
  // Half of L2: the rest is for Q, O and whatever else is on its way.
  TileOrder const order{
      l2_group(device.l2_bytes / 2, kv_bytes, params.heads_q / params.heads_kv, columns),
      params.mask.right >= 0};
  TileGrid const grid = make_tile_grid(params.seqlens, params.heads_q, Config::kBlockM, order);
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
