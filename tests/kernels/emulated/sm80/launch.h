// Stands in for csrc/sm80/launch.h, which the instantiations include: the same kernels, one block
// after the other, on the host.
#pragma once

#include <algorithm>

#include "instructions.h"
// The kernels come after the instructions.
#include "sm80/forward.h"
#include "sm80/forward_grid.h"

namespace flash::sm80 {

inline char smem_bytes[232448] __attribute__((aligned(128)));

template <class Config>
void launch_forward(FwdParams const& params, DeviceInfo const& device, cudaStream_t, char const*) {
  TileGrid const grid = forward_grid<Config>(params, device);
  for (int64_t tile = 0; tile < grid.num_tiles(); ++tile) {
    // NaN in either dtype, an integer out of all bounds: nobody may count on what was there before.
    std::fill_n(reinterpret_cast<uint16_t*>(smem_bytes), sizeof(smem_bytes) / 2, uint16_t{0x7fff});
    blockIdx.x = static_cast<int>(tile);
    simt::Block(Config::kThreads).run([&] { forward_kernel<Config>(params, grid); }, tile % 2 == 1);
  }
}

}  // namespace flash::sm80
