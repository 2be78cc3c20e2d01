// A tile, and the order of tiles in a rectangle of row blocks and heads.
#pragma once

#include <type_traits>

#include "params/seqlens.h"

namespace flash {

// A tile: a row block of one head of one batch entry, or in a backward a KV block.
struct WorkTile {
  int m_block;  // row block, or KV block, inside the sequence
  int head;     // query head; in a backward the KV head's GQA split
  int batch;    // batch entry, or sequence of a varlen batch
  bool valid;   // false for the surplus tiles of an upper-bound grid
};

// Row blocks of a sequence, or KV blocks: rows / block, rounded up.
FLASH_HD int num_blocks(int rows, int block) {
  // Not (rows + block - 1) / block, which overflows for rows close to 2^31.
  return rows / block + (rows % block != 0);
}

// The order in which tiles of a rectangle (row blocks x strips) run. A strip is one head of one
// batch entry, and all row blocks of a strip read the same K and V.
struct TileOrder {
  int side_by_side;    // strips that run together: the plan's choice
  bool longest_first;  // causal: the last row block sees most keys, so it starts before the short
                       // ones, which then fill the tail of the launch
};

template <class Index>
struct RectangleTile {
  int m_block;
  Index strip;
};

// One strip at a time has all its row blocks before the next strip. Strips side by side have all
// their last row blocks first, then all next-to-last ones, ...
// Index: int for a launch whose tiles it can count; a 64-bit division takes twenty registers, which
// a kernel may not have to spare.
template <class Index = int64_t>
FLASH_HD RectangleTile<Index> tile_at(TileOrder order, std::type_identity_t<Index> index,
                                      int m_blocks, std::type_identity_t<Index> strips) {
  Index const tiles_together = Index(order.side_by_side) * m_blocks;
  Index const before = index / tiles_together;
  Index const first_strip = before * order.side_by_side;
  Index const strips_left = strips - first_strip;
  Index const width = strips_left < order.side_by_side ? strips_left : order.side_by_side;

  Index const number = index - before * tiles_together;
  Index const row = number / width;
  int const m_block = order.longest_first ? int(m_blocks - 1 - row) : int(row);
  return {m_block, first_strip + (number - row * width)};
}

// Numbers the row blocks of all sequences, for workspaces that hold whole blocks.
struct RowBlocks {
  int block_m;

  // The first block of the sequence whose first row is row_q. It is the same bound as
  // VarlenTiles', so no prefix sum is needed.
  FLASH_HD int64_t first(const Seqlens& s, int sequence, int64_t row_q) const {
    return s.cu_q ? row_q / block_m + sequence
                  : int64_t(sequence) * num_blocks(s.seqlen_q, block_m);
  }

  // Includes room for rows after the last sequence, but none for rows before the first.
  FLASH_HD int64_t count(const Seqlens& s) const {
    return s.cu_q ? first(s, s.batch + 1, s.total_q) : first(s, s.batch, 0);
  }
};

// Rows of pack-GQA: the query heads that share a KV head are rows beside each other, so that the
// keys are read once for all of them.
struct QueryRow {
  int query;
  int head;  // of the group
};

// Row r of queries with `group` heads each.
FLASH_HD QueryRow query_row(FastDiv const& group, int r) {
  int const query = group.quotient(r);
  return {query, group.remainder(r, query)};
}

}  // namespace flash
