// The loading warp: finds tiles, describes them to the others, and keeps Q, K and V coming.
#pragma once

#include <new>

#include "sm90/forward/args.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90 {

template <class Config>
struct Loader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;          // the lane that talks to TMA
  uint32_t number = 0;   // row blocks so far
  uint32_t blocks = 0;   // key blocks so far
  uint32_t cleaned = 0;  // of them, with V cleaned up

  // All lanes come here; `tile` is valid.
  __device__ void load(WorkTile const& tile) {
    BlockInfo const info(args.params.seqlens, tile.batch);
    LoadPlan const plan(args.params, tile, info, Config::kBlockM, Config::kBlockN);
    int const steps = plan.range.count();
    if (steps > 0) {
      load_k(plan, 0);
    }
    announce(tile, info, plan);
    for (int step = 0; step < steps; ++step) {
      if (step + 1 < steps) {
        load_k(plan, step + 1);
      }
      // Keys end in the block that comes first.
      load_v(plan, step, step == 0 ? plan.keys_in_last : 0);
    }
    blocks += steps;
  }

  // A description that is not valid ends the others' loops.
  __device__ void finish() {
    if (elected) {
      smem.row_block(number).tile.valid = false;
      compiler_fence();
    }
    smem.q_ring.wait_empty(RingPosition<1>(number));
    if (elected) {
      smem.q_ring.full(0).arrive();
    }
  }

 private:
  __device__ void announce(WorkTile const& tile, BlockInfo const& info, LoadPlan const& plan) {
    if (elected) {
      new (&smem.row_block(number)) RowBlock<Config>(args.params, tile, info, plan.range);
      compiler_fence();
    }
    smem.q_ring.wait_empty(RingPosition<1>(number));
    if (elected) {
      Barrier& full = smem.q_ring.full(0);
      if (plan.range.count() > 0) {
        full.arrive_and_expect_tx(Config::kConsumers * Config::kTileQ * sizeof(Element));
#pragma unroll
        for (int i = 0; i < Config::kConsumers; ++i) {
          TileCoord const at{plan.q.row + i * kWarpgroupRows, plan.q.head, plan.q.batch};
          load_tile<kWarpgroupRows, Config::kHeadDim>(args.q, at, smem.q + i * Config::kTileQ, full,
                                                      TMA::CacheHintSm90::EVICT_FIRST);
        }
      } else {
        full.arrive();
      }
    }
    ++number;
  }

  __device__ static TileCoord keys(LoadPlan const& plan, int step) {
    return {plan.k.row + plan.range.block_at(step) * Config::kBlockN, plan.k.head, plan.k.batch};
  }

  __device__ void load_k(LoadPlan const& plan, int step) {
    Position const at(blocks + step);
    smem.k_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.k_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileK * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDim>(args.k, keys(plan, step), smem.k[at.stage], full,
                                                   TMA::CacheHintSm90::EVICT_LAST);
    }
  }

  __device__ void load_v(LoadPlan const& plan, int step, int keep) {
    Position const at(blocks + step);
    smem.v_ring.wait_empty(at);
    Barrier& ready = smem.v_ring.full(at.stage);
    Barrier& arrived = keep > 0 ? reinterpret_cast<Barrier&>(smem.v_arrived) : ready;
    if (elected) {
      arrived.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDimV>(args.v, keys(plan, step), smem.v[at.stage],
                                                    arrived, TMA::CacheHintSm90::EVICT_LAST);
    }
    if (keep > 0) {
      arrived.wait(cleaned++ % 2);
      compiler_fence();
      clear_rows(smem.v[at.stage], keep);
      // Ordinary stores, and wgmma reads through another path to memory.
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elected) {
        ready.arrive();
      }
    }
  }

  // Rows [keep, kBlockN) of a tile of V become zero. Swizzling moves bytes inside a row only.
  __device__ static void clear_rows(Element* tile, int keep) {
    constexpr int kColumns = kRun<Config::kHeadDimV>, kChunk = 16 / sizeof(Element);
#pragma unroll 1
    for (int run = 0; run < Config::kHeadDimV; run += kColumns) {
      Element* const rows = tile + run * Config::kBlockN;
#pragma unroll 1
      for (int i = keep * kColumns + threadIdx.x % 32 * kChunk; i < Config::kBlockN * kColumns;
           i += 32 * kChunk) {
        *reinterpret_cast<uint4*>(rows + i) = uint4{0, 0, 0, 0};
      }
    }
  }
};

}  // namespace flash::sm90
