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
    if (!varlen) {
      return DenseScheduler<Index>(dense, index, num_tiles()).coord();
    }
    auto const start = [&](int sequence) -> Index {
      return sequence <= seqlens.batch ? Index(seqlens.cu_q[sequence]) : Index(seqlens.total_q);
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

}  // namespace flash
