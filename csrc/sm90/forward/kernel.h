// Attention forward for Hopper: a persistent grid of thread blocks, each with one warpgroup that
// loads and two or three that compute 64 query rows each (FlashAttention-3, 2407.08608).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "sm90/forward/consumer.h"
#include "sm90/forward/loader.h"
#include "sm90/tile_draw.h"
#include "sm90/warp_search.h"

namespace flash::sm90 {

// All lanes of the loading warp.
template <class Config>
__device__ void load_row_blocks(ForwardArgs const& args, SharedStorage<Config>& smem) {
  constexpr unsigned kAll = 0xffffffffu;
  Loader<Config> loader{args, smem, static_cast<bool>(elect_one_sync())};
  uint32_t const num_tiles =
      args.queue.num_tiles;  // the host has seen to it that an int counts them
  uint32_t index = blockIdx.x;
  auto const draw = [&] { return draw_tile(args.queue, args.counter, index); };
  uint32_t drawn = index;
  int sequence = 0;    // of the tile before; they are drawn in order
  bool below = false;  // the tile was not drawn
  do {
    loader.load([&] {
      WorkTile tile = loader.tile_below();
      below = tile.valid;
      if (below) {
        return tile;
      }
      // The first tile from the one drawn that is valid, or none.
      index = __shfl_sync(kAll, drawn, 0);
      while (index < num_tiles) {
        tile = args.grid.tile(args.params.seqlens, static_cast<int>(index), WarpSearch{sequence});
        sequence = tile.batch;
        if (tile.valid) {
          break;
        }
        index = __shfl_sync(kAll, draw(), 0);
      }
      return tile;
    });
    // Asked for now, so that the answer is there when the next tile's first keys are on their way.
    if (index < num_tiles && !below) {
      drawn = draw();
    }
  } while (index < num_tiles);
  loader.end();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(__grid_constant__ ForwardArgs const args) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  if (threadIdx.x == 0) {
    smem.init();
  }
  __syncthreads();
  // The same in all lanes, and the compiler knows it.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    int const warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      load_row_blocks<Config>(args, smem);
    } else if (args.params.pages.table && warp == 1) {
      load_k_from_pages(args, smem);
    } else if (args.params.pages.table && warp == 2) {
      load_v_from_pages(args, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>{args, smem}.run();
  }
}

}  // namespace flash::sm90
