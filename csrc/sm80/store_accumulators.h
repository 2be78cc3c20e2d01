// Accumulators of a grid of warps, converted, to a tile in shared memory.
#pragma once

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// Writes a thread's part of a SmemTile<kRows, kColumns>'s columns from `begin` on, two neighbours
// at once. As for operands, all addresses are a constant and an XOR away from one (sm80/operand.h).
template <class Grid, int kRows, int kColumns, class Fragment>
__device__ __forceinline__ void store_accumulators(Fragment const& fragment,
                                                   typename Grid::Element* tile, int thread,
                                                   int begin = 0) {
  constexpr int kRowBytes = kRun<kColumns> * 2;
  GridCoord<Grid> const coord(thread);
  int const first = 2 * SmemTile<kRows, kColumns>{}(coord.row0, coord.col0);
#pragma unroll
  for (int n = 0; n < size<2>(fragment); ++n) {
    int const column = begin + n % 2 * 8 + n / 2 * 16 * Grid::kColumnWarps;
    int const run = column / kRun<kColumns>, in_run = column % kRun<kColumns>;
#pragma unroll
    for (int m = 0; m < size<1>(fragment); ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = run * kRows + m * 16 * Grid::kRowWarps + half * 8;
        auto* const target =
            reinterpret_cast<char*>(tile) + ((first ^ (in_run * 2)) + row * kRowBytes);
        *reinterpret_cast<uint32_t*>(target) =
            *reinterpret_cast<uint32_t const*>(&fragment(make_coord(0, half), m, n));
      }
    }
  }
}

}  // namespace flash::sm80
