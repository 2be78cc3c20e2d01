// How thread blocks that stay on their SM get their tiles; see docs/kernels/tile_counters.md.
#pragma once

#include "core/tile_queue.h"

namespace flash::sm90 {

// Zero when the library is loaded and, since each launch leaves them so, before every launch. The
// second half is for launches that start while the one before, of the same number, still draws.
constexpr int kTileCounters = 1 << 14;
__device__ static uint32_t tile_counters[2 * kTileCounters];

__device__ inline uint32_t draw(int counter, uint32_t last) {
  return threadIdx.x == 0 ? atomicInc(&tile_counters[counter], last) : 0;
}

// The first tile of `block`, and the one after `index`, in the warp's first lane. blocks: that
// draw, all of them the same number.
__device__ inline uint32_t draw_first_tile(TileQueue const& queue, int counter, uint32_t block,
                                           uint32_t blocks) {
  return queue.first(block, blocks, [&](uint32_t last) { return draw(counter, last); });
}
__device__ inline uint32_t draw_tile(TileQueue const& queue, int counter, uint32_t index,
                                     uint32_t blocks) {
  return queue.next(index, blocks, [&](uint32_t last) { return draw(counter, last); });
}

}  // namespace flash::sm90
