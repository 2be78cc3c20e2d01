// From a tile's number to its row block, for dense and varlen calls.
#pragma once

#include "core/tile_numbers.h"
#include "core/varlen_rows.h"

namespace flash {

// The tiles of one launch, one CTA each: dense and varlen calls run the same kernel, and only this
// look-up differs.
struct TileGrid {
  bool varlen;
  // For a varlen grid with short sequences: the tiles are the sequences' first row blocks alone, so
  // that there is nothing to search, and the CTA that draws one goes on to the tiles `below` it.
  bool first_only;
  DenseTiles dense;
  VarlenTiles by_length;

  FLASH_HD int64_t num_tiles() const {
    return varlen && !first_only ? by_length.num_tiles() : dense.num_tiles();
  }

  // Index: int64_t, or int if it can count num_tiles() (see tile_at).
  template <class Index, class Search = Bisection>
  FLASH_HD WorkTile tile(const Seqlens& seqlens, Index index, Search search = {}) const {
    return tile(seqlens.cu_q, seqlens.batch, seqlens.total_q, index, search, seqlens.few_q);
  }

  // cu, total: of the varlen tensor that is cut into tiles. few: RowOrder's.
  template <class Index, class Search = Bisection>
  FLASH_HD WorkTile tile(const int* cu, int batch, int64_t total, Index index, Search search = {},
                         int few = 0) const {
    VarlenRows const rows{cu, batch, int(total)};
    if (varlen && !first_only) {
      return find_tile(by_length, RowOrder(rows, few), index, search);
    }
    WorkTile tile = find_tile(dense, index);
    if (first_only && tile.valid) {
      int const length = rows.run(tile.batch).length;
      tile.valid = RowOrder(rows, few).wanted(tile.batch, length) > 0;
    }
    return tile;
  }

  // The next row block of a valid tile's sequence; valid if the CTA that drew the tile computes it.
  FLASH_HD WorkTile below(const Seqlens& s, WorkTile tile) const {
    VarlenRows const rows{s.cu_q, s.batch, int(s.total_q)};
    ++tile.m_block;
    tile.valid = first_only && tile.m_block * by_length.block_m < rows.run(tile.batch).length;
    return tile;
  }
};

// A varlen batch has two more sequences, for the rows that belong to none (see VarlenRows).
inline TileGrid make_tile_grid(const Seqlens& s, int heads, int block_m, TileOrder order) {
  TileGrid grid{};
  grid.varlen = s.cu_q != nullptr;
  if (grid.varlen) {
    int const batch = VarlenRows::count(s.batch);
    grid.by_length =
        s.few_q > 0 ? VarlenTiles::of(s.total_q, block_m, heads, batch, order, s.few_q, s.batch)
                    : VarlenTiles::of(s.total_q, block_m, heads, batch, order);
  } else {
    grid.dense = {num_blocks(s.seqlen_q, block_m), heads, s.batch, order};
  }
  return grid;
}

// The same with first_only, for sequences that are not much longer than one row block.
inline TileGrid make_first_blocks_grid(const Seqlens& s, int heads, int block_m) {
  TileGrid grid = make_tile_grid(s, heads, block_m, {/*side_by_side=*/1, /*longest_first=*/false});
  grid.first_only = true;
  grid.dense = {/*m_blocks=*/1, heads, VarlenRows::count(s.batch), grid.by_length.order};
  return grid;
}

// The same for tiles of keys with `heads` KV heads: m_block counts KV blocks of block_n keys.
inline TileGrid make_key_tile_grid(const Seqlens& s, int heads, int block_n, TileOrder order) {
  TileGrid grid{};
  grid.varlen = s.cu_k != nullptr;
  if (grid.varlen) {
    grid.by_length = VarlenTiles::of(s.total_k, block_n, heads, VarlenRows::count(s.batch), order);
  } else {
    grid.dense = {num_blocks(s.seqlen_k, block_n), heads, s.batch, order};
  }
  return grid;
}

}  // namespace flash
