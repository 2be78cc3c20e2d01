// Stands in for csrc/host/launch_kernel.h: the same kernels, one block after the other, on the
// host. The build puts instructions.h before everything else.
#pragma once

#include <algorithm>

#include "core/tile_scheduler.h"
#include "hopper/bulk_copies.h"
#include "host/device.h"
#include "host/error.h"
#include "host/variant.h"
#include "instructions.h"

namespace flash {

// What kernels declare extern; a GPU has no block with more.
inline char launch_smem[232448] __attribute__((aligned(1024)));

// A launch orders nothing, except for kernels that wait for blocks launched before.
inline bool last_block_first = false;

struct LaunchShape {
  int64_t blocks;
  int threads;
  int smem_bytes;
};

template <auto kKernel, class... Args>
void launch_kernel(LaunchContext const&, LaunchShape shape, Args const&... args) {
  simt::late_stores.clear();  // of a launch that threw
  gridDim.x = static_cast<int>(shape.blocks);
  blockDim.x = shape.threads;
  auto* const words = reinterpret_cast<uint16_t*>(launch_smem);
  auto* const words_end = reinterpret_cast<uint16_t*>(std::end(launch_smem));
  for (int64_t block = 0; block < shape.blocks; ++block) {
    std::fill(words, words_end, simt::kPoison);
    blockIdx.x = static_cast<int>(last_block_first ? shape.blocks - 1 - block : block);
    simt::Block(shape.threads, launch_smem, shape.smem_bytes,
                simt::Order::of(simt::first_order + block))
        .run([&] { kKernel(args...); });
    if (std::any_of(words + shape.smem_bytes / 2, words_end,
                    [](uint16_t w) { return w != simt::kPoison; })) {
      throw std::logic_error("a kernel writes behind its shared memory");
    }
  }
  simt::finish_stores();
}

}  // namespace flash
