// O and LSE from registers to global memory.
#pragma once

#include "sm90/forward/accumulators.h"
#include "sm90/forward/row_block.h"

namespace flash::sm90 {

// A quad of lanes holds, of one row, lane t columns 2 t and 2 t + 1 of four groups of eight. After
// this lane t holds all of group t: a 4 x 4 transpose of pairs, in two rounds of swaps.
__device__ inline void transpose_in_quad(uint32_t (&pairs)[4], int lane) {
  auto const swap = [&](uint32_t& low, uint32_t& high, int distance) {
    bool const upper = lane & distance;
    uint32_t const theirs = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    (upper ? low : high) = theirs;
  };
  swap(pairs[0], pairs[1], 1);
  swap(pairs[2], pairs[3], 1);
  swap(pairs[0], pairs[2], 2);
  swap(pairs[1], pairs[3], 2);
}

// Divides by the softmax denominator and writes O [rows, head_dim] and LSE [rows] of a warpgroup.
// Straight from registers: a way through shared memory and TMA would need a buffer that the larger
// tiles have no room for but in Q's or V's, whose next load would then wait for it; and the rows
// behind the end of a sequence belong to the next one. A quad writes 64 bytes of a row at a time.
template <class Config>
__device__ void store(FwdParams const& p, RowBlock<Config> const& block, int warpgroup, int thread,
                      Accumulators<Config>& acc) {
  using Element = typename Config::Element;
  FragmentCoord<4> const coord(thread);
  int const first = warpgroup * kWarpgroupRows, quad_lane = thread % 4;
  float const keep_scale =
      Config::kScores == ScoreLevel::Full ? 1.f / (1.f - p.scores.dropout_p) : 1.f;
  float scale[Accumulators<Config>::kRows];
#pragma unroll
  for (int r = 0; r < Accumulators<Config>::kRows; ++r) {
    int const row = first + coord.row(r);
    auto const finished = acc.softmax.finish(r, block.sink, QuadReduce{});
    scale[r] = finished.out_scale * keep_scale;
    if (quad_lane == 0 && row < block.rows) {
      block.lse[row] = finished.lse;
    }
  }
  acc.rescale(scale);

  constexpr int kGroups = Config::kHeadDimV / 8;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kGroups>>{});  // (row, group of 8 columns)
  pack<Element>(acc.out, pairs);
#pragma unroll
  for (int r = 0; r < Accumulators<Config>::kRows; ++r) {
    int const row = first + coord.row(r);
    Element* const target = block.out + row * p.out.row_stride;
#pragma unroll
    for (int group = 0; group < kGroups; group += 4) {
      uint32_t four[4] = {pairs(r, group), pairs(r, group + 1), pairs(r, group + 2),
                          pairs(r, group + 3)};
      transpose_in_quad(four, thread);
      int const column = (group + quad_lane) * 8;
      if (row < block.rows && column < p.head_dim_v) {
        *reinterpret_cast<uint4*>(target + column) = {four[0], four[1], four[2], four[3]};
      }
    }
  }
}

}  // namespace flash::sm90
