#pragma once

#include "sm90/backward/dq_action.h"
#include "sm90/tile_draw.h"

namespace flash::sm90::backward {

// The first tile of the number-th sequence and head of the KV-persistent schedule, in which a CTA,
// or a cluster, has all KV blocks of them, one after the other.
__device__ inline WorkTile first_tile_of(BwdParams const& p, uint32_t number) {
  Seqlens const& s = p.seqlens;
  uint32_t const heads = p.heads_kv * p.gqa.splits;
  int const sequence = static_cast<int>(number / heads), head = static_cast<int>(number % heads);
  if (!s.cu_k) {
    return {0, head, sequence, true};
  }
  int const ordered = p.workspace.order ? p.workspace.order[sequence] : sequence;
  VarlenRows const keys{s.cu_k, s.batch, static_cast<int>(s.total_k)};
  return {0, head, ordered, keys.run(ordered).length > 0};
}

// The tiles that a CTA, or a cluster that works as one, draws. All lanes of the CTA's first warp
// call its functions together.
template <class Config>
struct DrawnTiles {
  using Tile = KeyTile<Config>;

  BackwardArgs const& args;
  uint32_t block;
  uint32_t blocks;     // CTAs, or clusters, that draw tiles
  uint32_t index = 0;  // of the last tile
  bool started = false;
  bool kv_persistent = false;

  // The next valid tile, or none at the end. It is drawn when it is needed and not with the tile
  // before: a CTA that draws while it still works may not be the first to finish.
  __device__ Tile next() {
    Tile tile{};
    do {
      draw();
      if (over()) {
        break;
      }
      tile = tile_at(index);
    } while (!tile.valid);
    return tile;
  }

  __device__ bool over() const { return index >= args.queue.num_tiles; }

  // Found by bisection, which reaches every KV block, whatever cu_seqlens holds: in a deterministic
  // call other CTAs wait for each. No warp waits for the search.
  __device__ Tile tile_at(uint32_t number) const {
    Seqlens const& s = args.params.seqlens;
    int const drawn = static_cast<int>(number);
    if constexpr (Config::kRowSplit) {
      RowSplit const& rows = args.params.row_split;
      int const slot = rows.slot_of(drawn);
      int const index = slot < 0 ? drawn : rows.tile_of(slot);
      return {args.grid.tile(s.cu_k, s.batch, s.total_k, index), slot};
    } else {
      return kv_persistent ? first_tile_of(args.params, number)
                           : args.grid.tile(s.cu_k, s.batch, s.total_k, drawn);
    }
  }

 private:
  __device__ void draw() {
    uint32_t const drawn =
        started ? draw_tile(args.queue, blocks) : draw_first_tile(args.queue, block, blocks);
    index = __shfl_sync(0xffffffffu, drawn, 0);
    started = true;
  }
};

}  // namespace flash::sm90::backward
