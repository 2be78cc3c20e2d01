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

  FLASH_HD WorkTile tile(const Seqlens& seqlens, int64_t index) const {
    return tile(seqlens.cu_q, seqlens.batch, seqlens.total_q, index);
  }

  // cu, total: of the packed tensor that is cut into tiles.
  FLASH_HD WorkTile tile(const int* cu, int batch, int64_t total, int64_t index) const {
    if (!varlen) {
      return DenseScheduler(dense, index, num_tiles()).coord();
    }
    auto const start = [&](int sequence) -> int64_t {
      return sequence <= batch ? cu[sequence] : total;
    };
    return VarlenScheduler(by_length, start, index, num_tiles()).coord();
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
