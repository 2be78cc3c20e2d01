// How persistent CTAs draw their tiles; see docs/kernels/counters.md.
#pragma once

#include "core/tile_queue.h"

namespace flash::sm90 {

__device__ inline uint32_t draw(TileQueue const& queue, uint32_t last) {
  return threadIdx.x == 0 ? atomicInc(queue.counter, last) : 0;
}

// The first tile of CTA `block`, and the one after it, in the warp's first lane. blocks: how many
// CTAs draw, the same number in all of them.
__device__ inline uint32_t draw_first_tile(TileQueue const& queue, uint32_t block,
                                           uint32_t blocks) {
  return queue.first(block, blocks, [&](uint32_t last) { return draw(queue, last); });
}
__device__ inline uint32_t draw_tile(TileQueue const& queue, uint32_t blocks) {
  return queue.next(blocks, [&](uint32_t last) { return draw(queue, last); });
}

}  // namespace flash::sm90
