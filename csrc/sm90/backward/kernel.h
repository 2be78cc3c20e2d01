// Attention backward for Hopper: a persistent grid of CTAs, each with a warpgroup that loads and
// two consumer warpgroups. A consumer computes dK and dV of 64 keys, over the query heads that
// share them, or over one GQA split, and all rows that see them, and adds its part of dQ
// (FlashAttention-3, 2407.08608, with transposed scores).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "sm90/backward/drawn_tiles.h"
#include "sm90/backward/loader.h"
#include "sm90/backward/stream_consumer.h"
#include "sm90/backward/tile_consumer.h"

namespace flash::sm90::backward {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(__grid_constant__ BackwardArgs const args) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  bool const ordered = args.params.workspace.dq_semaphores != nullptr;
  if (threadIdx.x == 0) {
    smem.init_barriers(ordered);
  }
  let_next_launch_start();
  wait_for_launch_before();
  __syncthreads();
  // The shuffle tells the compiler that this is the same in all lanes.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    int const warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      DrawnTiles<Config> tiles{.args = args,
                               .block = blockIdx.x,
                               .blocks = gridDim.x,
                               .kv_persistent = Config::kKvPersistent};
      Loader<Config>{{args, smem, static_cast<bool>(elect_one_sync())}}.load_all(tiles);
    } else if (ordered && warp <= kDqSemaphoreWarps) {
      run_dq_semaphore(smem, DqSemaphoreWarp<Config>{args.params, smem.dq_semaphore, warp});
    } else if constexpr (Config::kComputesDelta) {
      if (warp == kDeltaWarp && args.params.ordered_dq.computes_delta) {
        DeltaWarp<Config>{args, smem.delta}.run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    using Consumer =
        std::conditional_t<Config::kStreamsTiles, StreamConsumer<Config>, TileConsumer<Config>>;
    Consumer{{args, smem}}.run();
  }
}

}  // namespace flash::sm90::backward
