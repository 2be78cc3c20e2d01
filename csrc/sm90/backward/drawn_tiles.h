#pragma once

#include "sm90/backward/kv_persistent.h"
#include "sm90/tile_draw.h"

namespace flash::sm90::backward {

// The tiles of one block of the grid, or of a cluster that works as one. All lanes of a warp, whose
// first thread is the block's, call its functions together.
template <class Config>
struct DrawnTiles {
  using Tile = KeyTile<Config>;

  BackwardArgs const& args;
  uint32_t block;
  uint32_t blocks;     // who draw tiles
  uint32_t index = 0;  // of the last one
  bool started = false;
  bool kv_persistent = false;

  // The first one that is valid, or none: then it is over. Drawn when it is asked for and not with
  // the tile before: who is still at work then may not be the first who is done.
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

  // By bisection: with it every block of keys is found, whatever cu_seqlens holds, and in a
  // deterministic call others wait for it. Nobody waits for the search.
  __device__ Tile tile_at(uint32_t number) const {
    Seqlens const& s = args.params.seqlens;
    int const drawn = static_cast<int>(number);
    if constexpr (Config::kRowParts) {
      RowParts const& cut = args.params.row_parts;
      int const slot = cut.slot_of(drawn);
      int const index = slot < 0 ? drawn : cut.tile_of(slot);
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
