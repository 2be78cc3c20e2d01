// The loading warp: finds tiles, describes them to the others, and keeps Q, K and V coming. Of keys
// in pages two other warps have K and V (pages.h).
#pragma once

#include <new>

#include "sm90/forward/args.h"
#include "sm90/forward/pages.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90 {

// All lanes call its functions together.
template <class Config>
struct Loader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Block = RowBlock<Config>;
  using Description = typename SharedStorage<Config>::Description;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;            // the lane that talks to TMA
  uint32_t described = 0;  // row blocks so far
  uint32_t blocks = 0;     // key blocks so far

  // Q, K and V of the row block that was described last, if there is one, and the description of
  // the next, of `next_tile`, as soon as the first keys are on their way: found between two tiles,
  // it was what the others waited for.
  template <class NextTile>
  __device__ void load(NextTile next_tile) {
    Block const& block = smem.row_block(described - 1);
    int const steps = described > 0 && !in_pages() ? block.range.count() : 0;
    // Q has to wait for its only buffer, the first keys do not.
    if (steps > 0) {
      load_k(block, 0);
    }
    if (described > 0) {
      load_q();
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
      }
    }
    blocks += steps;
  }

  // A tile that is not valid, described last, ends the others' loops.
  __device__ void end() { load_q(); }

  // The one below the tile that was described last, if tiles are drawn by first row blocks.
  __device__ WorkTile tile_below() const {
    if (!args.grid.first_only || described == 0) {
      return {0, 0, 0, false};
    }
    return args.grid.below(args.params.seqlens, smem.row_block(described - 1).tile);
  }

 private:
  __device__ void describe(WorkTile const& tile) {
    if (in_pages()) {
      smem.described.wait_empty(Description(described));
    }
    if (elected) {
      if (tile.valid) {
        new (&smem.row_block(described)) Block(args, tile, described);
      } else {
        smem.row_block(described).tile.valid = false;
      }
      compiler_fence();
    }
    __syncwarp();
    if (in_pages()) {
      announce_keys(smem.row_block(described));
    }
    ++described;
  }

  __device__ bool in_pages() const { return args.params.pages.table; }

  // To those who load its keys. If a page is missing, no block of keys goes without mask code: to
  // ask in each would cost those that have all their pages.
  __device__ void announce_keys(Block& block) {
    bool const missing = block.tile.valid && misses_pages(args, block);
    if (elected) {
      if (missing) {
        block.range.left = block.range.right = block.range.begin;
      }
      smem.described.full(Description(described).stage).arrive();
    }
    __syncwarp();
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
    int const queries = args.rows.template queries_of<Config>();
    int const rows_filled =
        Config::kPacked ? queries * static_cast<int>(args.rows.heads.divisor) : kWarpgroupRows;
    full.arrive_and_expect_tx(Config::kConsumers * rows_filled * Config::kHeadDim *
                              sizeof(Element));
#pragma unroll
    for (int i = 0; i < Config::kConsumers; ++i) {
      load_tile<kWarpgroupRows, Config::kHeadDim>(args.q, part(block.q_at, i, queries),
                                                  smem.q + i * Config::kTileQ, full,
                                                  TMA::CacheHintSm90::EVICT_FIRST);
    }
  }

  // The i-th `rows` of these, or as many as there are.
  __device__ static TileCoord part(TileCoord const& all, int i, int rows) {
    int const first = i * rows;
    return {all.row + first, min(max(all.rows - first, 0), rows), all.head, all.batch};
  }

  __device__ static TileCoord keys(Block const& block, int step) {
    return part(block.keys_at, block.range.block_at(step), Config::kBlockN);
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

  __device__ void load_v(Block const& block, int step) {
    Position const at(blocks + step);
    smem.v_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.v_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDimV>(args.v, keys(block, step), smem.v[at.stage],
                                                    full, TMA::CacheHintSm90::EVICT_LAST);
    }
  }
};

}  // namespace flash::sm90
