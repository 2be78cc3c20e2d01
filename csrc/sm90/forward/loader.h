// The loading warp: finds tiles, describes them to the others, and keeps Q, K and V coming.
#pragma once

#include <new>

#include "sm90/forward/args.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90 {

// All lanes call its functions together.
template <class Config>
struct Loader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Block = RowBlock<Config>;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;            // the lane that talks to TMA
  uint32_t described = 0;  // row blocks so far
  uint32_t blocks = 0;     // key blocks so far
  uint32_t cleaned = 0;    // of them, with V cleaned up

  // K and V of the row block that was described last, if there is one, and the description of the
  // next, of `next_tile`, as soon as the first keys are on their way: found between two tiles, it
  // was what the others waited for. Then its Q, when the only buffer is free of this one's. A tile
  // that is not valid ends the others' loops.
  template <class NextTile>
  __device__ void load(NextTile next_tile) {
    Block const& block = smem.row_block(described - 1);
    int const steps = described > 0 ? block.range.count() : 0;
    if (steps > 0) {
      load_k(block, 0);
    }
    for (int step = 0; step < max(steps, 1); ++step) {
      if (step + 1 < steps) {
        load_k(block, step + 1);
      }
      if (step < steps) {
        load_v(block, step);
      }
      if (step == 0) {
        describe(next_tile());
        if (steps > 0 && block.keys_in_last > 0) {
          clean_v(block.keys_in_last);
        }
      }
    }
    blocks += steps;
    load_q();
  }

 private:
  __device__ void describe(WorkTile const& tile) {
    if (elected) {
      if (tile.valid) {
        new (&smem.row_block(described)) Block(args.params, tile);
      } else {
        smem.row_block(described).tile.valid = false;
      }
      compiler_fence();
    }
    __syncwarp();
    ++described;
  }

  // Of the row block that was described last; its arrival also announces the description.
  __device__ void load_q() {
    uint32_t const number = described - 1;
    smem.q_ring.wait_empty(RingPosition<1>(number));
    if (!elected) {
      return;
    }
    Block const& block = smem.row_block(number);
    Barrier& full = smem.q_ring.full(0);
    if (!block.tile.valid || block.range.count() == 0) {
      full.arrive();
      return;
    }
    full.arrive_and_expect_tx(Config::kConsumers * Config::kTileQ * sizeof(Element));
#pragma unroll
    for (int i = 0; i < Config::kConsumers; ++i) {
      TileCoord const rows{block.q_at.row + i * kWarpgroupRows, block.q_at.head, block.q_at.batch};
      load_tile<kWarpgroupRows, Config::kHeadDim>(args.q, rows, smem.q + i * Config::kTileQ, full,
                                                  TMA::CacheHintSm90::EVICT_FIRST);
    }
  }

  __device__ static TileCoord keys(Block const& block, int step) {
    TileCoord const& first = block.keys_at;
    return {first.row + block.range.block_at(step) * Config::kBlockN, first.head, first.batch};
  }

  __device__ void load_k(Block const& block, int step) {
    Position const at(blocks + step);
    smem.k_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.k_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileK * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDim>(args.k, keys(block, step), smem.k[at.stage],
                                                   full, TMA::CacheHintSm90::EVICT_LAST);
    }
  }

  // Keys end in the block that comes first, which the others get cleaned up.
  __device__ void load_v(Block const& block, int step) {
    Position const at(blocks + step);
    smem.v_ring.wait_empty(at);
    if (elected) {
      bool const to_clean = step == 0 && block.keys_in_last > 0;
      Barrier& arrived = to_clean ? v_arrived() : smem.v_ring.full(at.stage);
      arrived.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDimV>(args.v, keys(block, step), smem.v[at.stage],
                                                    arrived, TMA::CacheHintSm90::EVICT_LAST);
    }
  }

  __device__ Barrier& v_arrived() const { return reinterpret_cast<Barrier&>(smem.v_arrived); }

  // V of the first step, of which `keep` rows are the sequence's.
  __device__ void clean_v(int keep) {
    Position const at(blocks);
    v_arrived().wait(cleaned++ % 2);
    compiler_fence();
    clear_rows(smem.v[at.stage], keep);
    // Ordinary stores, and wgmma reads through another path to memory.
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (elected) {
      smem.v_ring.full(at.stage).arrive();
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
