// Stores O from registers to global memory, through shared memory and TMA: with a quarter of the
// instructions, and while the next row block is computed.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/forward/accumulators.h"
#include "sm90/forward/row_block.h"

namespace flash::sm90::forward {

// Writes O [rows, kTileColumns] of a warpgroup. Each warp has its 16 rows to itself, so that none
// waits for another; a box ends with the tensor or with the sequence, as boxes of loads do.
template <class Config>
__device__ void store_tile(ForwardArgs const& args, RowBlock<Config> const& block,
                           typename Config::Element* tile, int warpgroup, int thread,
                           Accumulators<Config> const& acc) {
  using Element = typename Config::Element;
  constexpr int kRunColumns = kRun<Config::kHeadDimV>, kEights = Config::kTileColumns / 8;
  static_assert(kRunColumns == 64);  // a swizzle of eight rows, whose eights of columns swap places
  int const warp = thread / 32, lane = thread % 32;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
  pack_out<Config>(args.params, acc.out, pairs);
  if (lane == 0) {
    tma_store_wait<0>();  // the row block before has left
  }
  __syncwarp();
  // stmatrix takes the addresses of two eights in 16 rows from the lanes.
  Element* const rows = tile + warp * kWarpRows * kRunColumns;
  Element* const row = rows + lane % kWarpRows * kRunColumns;
  int const own_eight = lane / kWarpRows ^ lane % 8;
#pragma unroll
  for (int eight = 0; eight < kEights; eight += 2) {
    int const run = eight / 8 * kWarpgroupRows * kRunColumns;
    Element* const to = row + run + (own_eight ^ eight % 8) * 8;
    SM90_U32x4_STSM_N::copy(pairs(0, eight), pairs(1, eight), pairs(0, eight + 1),
                            pairs(1, eight + 1), *reinterpret_cast<uint128_t*>(to));
  }
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  int const first = warpgroup * kWarpgroupRows + warp * kWarpRows;
  int const existing = min(block.rows - first, kWarpRows);
  if (lane == 0 && existing > 0) {
    auto const c =
        args.out.coordinates({block.q_at.row + first, existing, block.q_at.head, block.q_at.batch});
#pragma unroll
    for (int run = 0; run < Config::kTileColumns; run += kRunColumns) {
      SM90_TMA_STORE_5D::copy(&args.out.map, rows + run * kWarpgroupRows, run, c.c1, c.c2, c.c3,
                              c.c4);
    }
    tma_store_arrive();
  }
}

// Writes all of O [rows, head_dim_v] of a warpgroup, where shared memory has room for some of its
// runs only: run by run, each as soon as the run that was in its place has left. A function for
// both loops that stage changes d 128's machine code.
template <class Config>
__device__ __forceinline__ void store_runs(ForwardArgs const& args, RowBlock<Config> const& block,
                                           typename Config::Element* tile, int warpgroup,
                                           int thread, FinishedRows<Config> const& pairs) {
  using Element = typename Config::Element;
  constexpr int kRunColumns = kRun<Config::kHeadDimV>, kPlaces = Config::kTileColumns / kRunColumns;
  static_assert(kRunColumns == 64);
  // Otherwise a row block's first run would be written where the last one of the block before still
  // is.
  static_assert(Config::kHeadDimV / kRunColumns % kPlaces == 0);
  int const warp = thread / 32, lane = thread % 32;
  int const own_eight = lane / kWarpRows ^ lane % 8;
  int const first = warpgroup * kWarpgroupRows + warp * kWarpRows;
  int const existing = min(block.rows - first, kWarpRows);
  auto const c =
      args.out.coordinates({block.q_at.row + first, existing, block.q_at.head, block.q_at.batch});
#pragma unroll
  for (int column = 0; column < Config::kHeadDimV; column += kRunColumns) {
    int const place = column / kRunColumns % kPlaces;
    Element* const rows = tile + (place * kWarpgroupRows + warp * kWarpRows) * kRunColumns;
    if (lane == 0) {
      tma_store_wait<kPlaces - 1>();
    }
    __syncwarp();
    Element* const row = rows + lane % kWarpRows * kRunColumns;
#pragma unroll
    for (int eight = 0; eight < kRunColumns / 8; eight += 2) {
      int const of_all = column / 8 + eight;
      Element* const to = row + (own_eight ^ eight) * 8;
      SM90_U32x4_STSM_N::copy(pairs(0, of_all), pairs(1, of_all), pairs(0, of_all + 1),
                              pairs(1, of_all + 1), *reinterpret_cast<uint128_t*>(to));
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) {
      if (existing > 0) {
        SM90_TMA_STORE_5D::copy(&args.out.map, rows, column, c.c1, c.c2, c.c3, c.c4);
      }
      tma_store_arrive();  // a run that is empty counts as well
    }
  }
}

}  // namespace flash::sm90::forward
