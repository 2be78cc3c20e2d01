// The scheduler warp: draws a CTA's row blocks, and announces in shared memory what the other warps
// have to know of each.
#pragma once

#include <new>

#include "core/forward_beside_decode.h"
#include "sm90/forward/pages.h"
#include "sm90/tile_draw.h"

namespace flash::sm90::forward {

// Work of this lane's sequences, for the share of the GPU that a launch takes beside one of the
// decode kernel (core/forward_beside_decode.h). The lanes of one warp have all sequences between
// them.
template <class Config>
__device__ MixedWork mixed_work(ForwardArgs const& args) {
  FwdParams const& p = args.params;
  int const block_rows = Config::kConsumers * args.rows.template queries_of<Config>();
  int const heads = Config::kPackGqa ? p.heads_kv : p.heads_q;
  MixedWork work;
  for (int b = WarpLanes{}.index(); b < p.seqlens.batch; b += WarpLanes::kCount) {
    BlockInfo const info(p.seqlens, b);
    SequenceMask const mask(p.mask, info.seqlen_q, info.seqlen_k);
    // Few queries count all keys that they see, many queries those that the middle one sees.
    bool const few = info.seqlen_q <= p.seqlens.few_q;
    int const last = few ? info.seqlen_q - 1 : info.seqlen_q / 2;
    float const keys = float(max(mask.end(last) - mask.begin(few ? 0 : last), 0));
    if (few) {
      work.decode_keys += info.seqlen_q > 0 ? keys * float(p.heads_kv) : 0.f;
    } else {
      float const tiles = float(num_blocks(info.seqlen_q, block_rows) * heads);
      work.tiles += tiles;
      work.tile_keys += tiles * keys;
    }
  }
  return work;
}

// How many CTAs share the tiles: those of the lowest numbers. One warp calls it before tiles are
// looked for.
template <class Config>
__device__ int sharing_blocks(ForwardArgs const& args) {
  int const all = static_cast<int>(gridDim.x);
  if (args.params.seqlens.few_q == 0) {
    return all;
  }
  MixedWork work = mixed_work<Config>(args);
#pragma unroll
  for (int distance = WarpLanes::kCount / 2; distance > 0; distance /= 2) {
    work.tiles += __shfl_xor_sync(WarpLanes::kAll, work.tiles, distance);
    work.tile_keys += __shfl_xor_sync(WarpLanes::kAll, work.tile_keys, distance);
    work.decode_keys += __shfl_xor_sync(WarpLanes::kAll, work.decode_keys, distance);
  }
  return forward_blocks(work, Config::kBlockM, all);
}

// All lanes call its functions together.
template <class Config>
struct SchedulerWarp {
  using Block = RowBlock<Config>;
  using Description = typename SharedStorage<Config>::Description;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;                // the lane that writes
  uint32_t index{blockIdx.x};  // of the tile that was drawn last
  int sequence = 0;            // of the tile before; tiles are drawn in order

  // An invalid tile, announced last, ends the other warps' loops.
  __device__ void run() {
    WorkTile tile = drawn_tile();
    for (uint32_t number = 0;; ++number) {
      describe(tile, number);
      if (!tile.valid) {
        return;
      }
      // A tile is drawn when it is needed and not before: a CTA that draws while it still works may
      // not be the first to finish.
      smem.asked.wait_full(RingPosition<1>(number));
      tile = tile_after(tile);
    }
  }

 private:
  __device__ WorkTile tile_after(WorkTile const& tile) {
    if (args.grid.first_only) {
      WorkTile const below = args.grid.below(args.params.seqlens, tile);
      if (below.valid) {
        return below;
      }
    }
    draw();
    return drawn_tile();
  }

  __device__ void draw() {
    index = __shfl_sync(WarpLanes::kAll, draw_tile(args.queue, smem.blocks), 0);
  }

  // The first valid tile from the drawn one on, or none.
  __device__ WorkTile drawn_tile() {
    WorkTile tile{0, 0, 0, false};
    // The host has checked that an int counts them.
    while (index < args.queue.num_tiles) {
      tile = args.grid.tile(args.params.seqlens, static_cast<int>(index), WarpSearch{sequence});
      sequence = tile.batch;
      if (tile.valid) {
        break;
      }
      draw();
    }
    return tile;
  }

  __device__ void describe(WorkTile const& tile, uint32_t number) {
    bool const in_pages = args.params.pages.table;
    if (in_pages || Config::kCodes) {
      smem.described.wait_empty(Description(number));
    }
    Block& block = smem.row_block(number);
    if (elected) {
      if (tile.valid) {
        new (&block) Block(args, tile, number);
      } else {
        block.tile.valid = false;
      }
      compiler_fence();
      smem.described.full(Description(number).stage).arrive();
    }
    __syncwarp();
    if (in_pages) {
      look_for_missing_pages(block, number);
    }
  }

  // Runs while the first keys are on their way, and before consumers start. If a page is missing,
  // every KV block runs mask code: a test in each would cost row blocks that have all their pages.
  __device__ void look_for_missing_pages(Block& block, uint32_t number) {
    bool const missing = block.tile.valid && misses_pages(args, block);
    for (Ring<1>& ring : smem.q_ring) {
      ring.wait_empty(RingPosition<1>(number));
    }
    if (elected) {
      if (missing) {
        block.masked_steps = block.range.count();
      }
      compiler_fence();
      for (Ring<1>& ring : smem.q_ring) {
        ring.full(0).arrive();
      }
    }
    __syncwarp();
  }
};

}  // namespace flash::sm90::forward
