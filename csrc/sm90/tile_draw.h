// How persistent CTAs draw their tiles; see docs/kernels/counters.md.
#pragma once

#include "core/tile_numbers.h"
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

// core/tile_numbers.h's Bisection by all lanes of a warp: each round of loads leaves a 33rd of
// the candidates, so that one of 8,192 sequences is found in three rounds and not in thirteen. The
// search ends even where starts decrease, but then it may miss row blocks: a kernel whose CTAs wait
// for earlier row blocks has to use Bisection.
struct WarpSearch {
  // Result of the last search, if this one cannot find less: with many short sequences the new
  // result is one of the next few, which one round tells.
  int from = 0;

  template <class Rows, class IsAfter>
  __device__ SequencePlace operator()(int count, Rows const& rows, IsAfter is_after) const {
    constexpr int kLanes = 32;
    int const lane = static_cast<int>(threadIdx.x) % kLanes;
    int low = from, high = count;  // `low` is not after, `high` is
    bool near = low > 0;
    while (high - low > 1) {
      int const step = near ? 1 : (high - low + kLanes) / (kLanes + 1);
      near = false;
      int const candidate = low + step * (lane + 1);
      bool const after = candidate >= high || is_after(candidate, rows.start(candidate));
      int const not_after = kLanes - __popc(__ballot_sync(0xffffffffu, after));
      high = not_after < kLanes ? min(high, low + step * (not_after + 1)) : high;
      low += step * not_after;
    }
    return {low, rows.start(low), rows.start(low + 1)};
  }
};

}  // namespace flash::sm90
