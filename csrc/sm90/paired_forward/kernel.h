// Attention forward for Hopper where O has more columns than one warpgroup has registers for. A CTA
// has 64 rows: one warpgroup computes P, two others half of O's columns each. A pair of CTAs has
// neighbouring rows and loads K and V for each other, because 64 rows alone would take from L2 more
// than it gives.
#pragma once

#include "sm90/paired_forward/scores.h"
#include "sm90/paired_forward/values.h"

#include <cutlass/arch/reg_reconfig.h>

#include <new>

#include "core/copy_async.h"
#include "core/dynamic_smem.h"
#include "core/early_launch.h"

namespace flash::sm90::forward {

// Copies a CTA's rows of Q to where the first warpgroup reads them, by all threads. Columns beyond
// the head's, and rows that do not exist, become zero; so do columns of K that are not loaded.
template <class Config>
__device__ void load_queries(FwdParams const& p, PairedRowBlock<Config> const& block, int k_runs,
                             PairedForwardStorage<Config>& smem) {
  constexpr int kChunks = Config::kHeadDim / 8;
  // The last buffer has Q.
  for (int stage = 0; stage < Config::kStages - 1; ++stage) {
    smem.clear_columns(stage, k_runs, threadIdx.x, Config::kThreads);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * kChunks; i += Config::kThreads) {
    int const row = i / kChunks, column = i % kChunks * 8;
    bool const exists = row < block.rows && column < p.head_dim;
    auto const* const source = block.q + (exists ? row * p.q.row_stride + column : 0);
    SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
        *reinterpret_cast<uint128_t const*>(source),
        *reinterpret_cast<uint128_t*>(
            Config::Queries::address(smem.tiles[Config::kStages - 1], smem.q, row, column)),
        exists);
  }
  cp_async_fence();
  cp_async_wait<0>();
  cutlass::arch::fence_view_async_shared();
}

template <class Config>
__device__ __forceinline__ void attend(PairedForwardArgs const& args,
                                       PairedForwardStorage<Config>& smem, uint32_t rank) {
  using cutlass::arch::warpgroup_reg_alloc, cutlass::arch::warpgroup_reg_dealloc;
  auto const& block = *reinterpret_cast<PairedRowBlock<Config> const*>(smem.block);
  // The shuffle tells the compiler that this is the same in all lanes.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x < 32) {
    PairedTileLoader<Config> const loader{args, block, smem, rank};
    loader.load_keys(0);
    loader.load_keys(1);
  }
  if (block.range.count() > 0) {
    load_queries(args.params, block, args.k_runs, smem);
  }
  __syncthreads();
  if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kScoreRegisters>();
    PairedScoreWarpgroup<Config> scores{args, block, smem};
    if (block.range.count() > 0) {
      scores.run();
    }
    scores.finish();
  } else {
    warpgroup_reg_dealloc<Config::kValueRegisters>();
    PairedValueWarpgroup<Config> values{args, block, smem, rank, warpgroup - 1};
    values.run();
    values.store();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paired_forward_kernel(__grid_constant__ PairedForwardArgs const args) {
  auto& smem = *reinterpret_cast<PairedForwardStorage<Config>*>(dynamic_smem());
  auto& block = *reinterpret_cast<PairedRowBlock<Config>*>(smem.block);
  let_next_launch_start();
  uint32_t const rank = cute::block_rank_in_cluster();
  if (threadIdx.x == 0) {
    WorkTile const tile = args.grid.tile(args.params.seqlens, blockIdx.x / Config::kPair);
    if (tile.valid) {
      new (&block) PairedRowBlock<Config>(args.params, tile, static_cast<int>(rank));
    } else {
      block.tile.valid = false;
    }
  } else if (threadIdx.x == 32) {
    prefetch_tma_descriptor(&args.k.map);
    prefetch_tma_descriptor(&args.v.map);
    smem.init();
  }
  cute::cluster_sync();  // after it the other CTA's barriers can be reached
  if (block.tile.valid) {
    attend<Config>(args, smem, rank);
  }
  cute::cluster_sync();  // the other CTA still reaches this one's barriers
}

}  // namespace flash::sm90::forward
