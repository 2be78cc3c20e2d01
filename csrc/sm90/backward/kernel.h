// Attention backward for Hopper: a persistent grid of thread blocks, each
// with one warpgroup that loads and two that compute dK and dV of 64 keys each, over the query
// heads that share them, or a part of those, and all rows that see them, and add their part of dQ
// (FlashAttention-3, 2407.08608, with transposed scores).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "sm90/backward/consumer.h"
#include "sm90/backward/loader.h"
#include "sm90/tile_draw.h"

namespace flash::sm90 {

// A warp that keeps turns.
template <class Config>
__device__ void keep_turns(SharedStorage<Config>& smem, TurnKeeper<Config> keeper) {
  for (uint32_t number = 0;; ++number) {
    smem.k_ring.wait_full(RingPosition<1>(number));
    KeyBlock<Config> const& block = smem.key_block(number);
    if (!block.tile.valid) {
      return;
    }
    // At once, or the next keys would wait for turns to be passed on. What describes the block
    // stays for two more.
    smem.k_ring.release(0);
    keeper.keep(block);
  }
}

// All lanes of the loading warp.
template <class Config>
__device__ void load_key_blocks(BackwardArgs const& args, SharedStorage<Config>& smem) {
  constexpr unsigned kAll = 0xffffffffu;
  Loader<Config> loader{args, smem, static_cast<bool>(elect_one_sync())};
  Seqlens const& s = args.params.seqlens;
  uint32_t const num_tiles = args.queue.num_tiles;  // an int counts them
  auto const draw = [&](uint32_t index) {
    return __shfl_sync(kAll, draw_tile(args.queue, args.counter, index, gridDim.x), 0);
  };
  uint32_t index = __shfl_sync(kAll, draw_first_tile(args.queue, args.counter, gridDim.x), 0);
  do {
    loader.load([&] {
      WorkTile tile{0, 0, 0, false};
      // The first tile from the next one that is valid, or none. Drawn now and not with the tile
      // before: who is still at work then may not be the first who is done.
      index = loader.described == 0 ? index : draw(index);
      while (index < num_tiles) {
        // By bisection: with it every block of keys is found, whatever cu_seqlens holds, and in a
        // deterministic call others wait for it. Nobody waits for the search.
        tile = args.grid.tile(s.cu_k, s.batch, s.total_k, static_cast<int>(index));
        if (tile.valid) {
          break;
        }
        index = draw(index);
      }
      return tile;
    });
  } while (index < num_tiles);
  loader.end();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(__grid_constant__ BackwardArgs const args) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  bool const in_turns = args.params.workspace.turns != nullptr;
  if (threadIdx.x == 0) {
    smem.init_barriers(in_turns);
  }
  __syncthreads();
  // The same in all lanes, and the compiler knows it.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    int const warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      load_key_blocks<Config>(args, smem);
    } else if (in_turns && warp <= kTurnKeepers) {
      keep_turns<Config>(smem, {args.params.workspace.turns, smem.turns, warp});
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>{args, smem}.run();
  }
}

}  // namespace flash::sm90
