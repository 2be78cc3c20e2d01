// Attention backward for Hopper by pairs of CTAs, for head dims at which one CTA has no room for
// enough keys. Each CTA of a pair has 64 keys and sums their dK and dV over all rows that see them.
// The pair swaps dS, so that each CTA has the dQ of all 128 keys in half of the columns, and adds
// to fp32 sums in global memory half as often. Above head dim 256 a cluster has two pairs, each
// with half of the columns of everything, which swap their parts of S and dP.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "sm90/paired_backward/gradient_warps.h"
#include "sm90/paired_backward/loader.h"
#include "sm90/paired_backward/score_warps.h"

namespace flash::sm90::backward {

// Inline, because products in a function that is called are waited for one by one.
template <class Config>
__device__ __forceinline__ void run_roles(BackwardArgs const& args, PairedStorage<Config>& smem,
                                          CtaPart<Config> part) {
  constexpr unsigned kAll = 0xffffffffu;
  // The shuffle tells the compiler that this is the same in all lanes.
  int const warpgroup = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  int const thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    int const warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      DrawnTiles<Config> const drawn{.args = args,
                                     .block = blockIdx.x / uint32_t{Config::kCluster},
                                     .blocks = gridDim.x / uint32_t{Config::kCluster},
                                     .kv_persistent = Config::kKvPersistent};
      PairedTiles<Config> tiles{drawn, smem.draws, part.rank};
      PairedLoader<Config>{{args, smem, static_cast<bool>(elect_one_sync())}, part}.load_all(tiles);
    } else if (args.params.workspace.dq_semaphores && warp <= kDqSemaphoreWarps) {
      run_dq_semaphore(smem, DqSemaphoreWarp<Config>{args.params, smem.dq_semaphore, warp});
    } else if constexpr (Config::kComputesDelta) {
      if (warp == kDeltaWarp && args.params.ordered_dq.computes_delta) {
        DeltaWarp<Config>{args, smem.delta}.run();
      }
    }
  } else if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_alloc<Config::kScoreRegisters>();
    ScoreWarps<Config>{args, smem, part, thread}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kGradientRegisters>();
    GradientWarps<Config>{args, smem, part, thread}.run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paired_backward_kernel(__grid_constant__ BackwardArgs const args) {
  auto& smem = *reinterpret_cast<PairedStorage<Config>*>(dynamic_smem());
  if (threadIdx.x == 0) {
    smem.init_barriers(args.params.workspace.dq_semaphores != nullptr);
  }
  CtaPart<Config> const part{cute::block_rank_in_cluster()};
  if constexpr (Config::kSplitsColumns) {
    smem.clear_tiles(args.params, part);
  }
  let_next_launch_start();
  wait_for_launch_before();
  cute::cluster_sync();  // after it the other CTAs' barriers can be reached
  run_roles<Config>(args, smem, part);
  cute::cluster_sync();  // the other CTAs may still release buffers here
}

}  // namespace flash::sm90::backward
