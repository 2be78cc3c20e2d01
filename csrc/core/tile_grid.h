#pragma once

#include "core/block_info.h"
#include "core/tile_scheduler.h"

namespace flash {

// The tiles of one launch, one thread block each: dense and varlen calls run the same kernel, and
// only this look-up differs.
struct TileGrid {
  bool varlen;
  DenseSchedule dense;
  VarlenSchedule by_length;

  FLASH_HD int64_t num_tiles() const { return varlen ? by_length.num_tiles() : dense.num_tiles(); }

  // Index: int64_t, or int where num_tiles() is not more (see tile_at).
  template <class Index, class Search = Bisection>
  FLASH_HD WorkTile tile(const Seqlens& seqlens, Index index, Search search = {}) const {
    return tile(seqlens.cu_q, seqlens.batch, seqlens.total_q, index, search);
  }

  // cu, total: of the packed tensor that is cut into tiles.
  template <class Index, class Search = Bisection>
  FLASH_HD WorkTile tile(const int* cu, int batch, int64_t total, Index index,
                         Search search = {}) const {
    if (!varlen) {
      return DenseScheduler<Index>(dense, index, num_tiles()).coord();
    }
    auto const start = [&](int sequence) -> Index {
      return sequence <= batch ? Index(cu[sequence]) : Index(total);
    };
    return VarlenScheduler(by_length, start, index, num_tiles(), search).coord();
  }
};

// A varlen batch has one sequence more: the rows behind the last one (see BlockInfo).
inline TileGrid make_tile_grid(const Seqlens& s, int heads, int block_m, TileOrder order) {
  TileGrid grid{};
  grid.varlen = s.cu_q != nullptr;
  if (grid.varlen) {
    grid.by_length = {s.total_q, block_m, heads, s.batch + 1, order};
  } else {
    grid.dense = {num_m_blocks(s.seqlen_q, block_m), heads, s.batch, order};
  }
  return grid;
}

// The same for tiles of keys, of `heads` KV heads: m_block counts blocks of block_n keys.
inline TileGrid make_key_tile_grid(const Seqlens& s, int heads, int block_n, TileOrder order) {
  TileGrid grid{};
  grid.varlen = s.cu_k != nullptr;
  if (grid.varlen) {
    grid.by_length = {s.total_k, block_n, heads, s.batch + 1, order};
  } else {
    grid.dense = {num_m_blocks(s.seqlen_k, block_n), heads, s.batch, order};
  }
  return grid;
}

}  // namespace flash
