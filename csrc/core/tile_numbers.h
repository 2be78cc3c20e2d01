// Which tile has which number, in dense calls and in varlen ones.
#pragma once

#include "core/work_tile.h"

namespace flash {

// Tiles are numbered along one dimension, because grid y and z end at 65,535. A CTA that computes
// one tile, and a persistent one that draws many, ask the same function for them.

constexpr int64_t max_grid_blocks = 2147483647;  // gridDim.x

// The most strips side by side, up to `most`, that leave no small rest: a few strips would run at
// the end, while most of the GPU is idle.
FLASH_HD int even_group(int most, int64_t num_strips) {
  int64_t const times = (num_strips + most - 1) / most;
  return times > 1 ? int((num_strips + times - 1) / times) : most;
}

// Every sequence has the same length. Fixed by the host for a launch.
struct DenseTiles {
  int m_blocks;  // row blocks per sequence
  int heads;     // query heads
  int batch;
  TileOrder order;

  FLASH_HD int64_t strips() const { return int64_t(heads) * batch; }
  FLASH_HD int64_t num_tiles() const { return strips() * m_blocks; }
};

// Index: the type that counts tiles (see tile_at).
template <class Index>
FLASH_HD WorkTile find_tile(DenseTiles s, Index index) {
  if (index >= s.num_tiles()) return {0, 0, 0, false};
  auto const [m_block, strip] = tile_at<Index>(s.order, index, s.m_blocks, Index(s.strips()));
  Index const batch = strip / s.heads;
  return {m_block, int(strip - batch * s.heads), int(batch), true};
}

// The result of a search: a sequence, and where it and the next one start.
struct SequencePlace {
  int sequence;
  int start;
  int next_start;
};

// Finds the last sequence of [0, count) for which is_after is false. It is false for 0, and all
// sequences for which it is true come after the others. rows.start(0) = 0 is the least start,
// rows.start(count) the greatest.
//
// A start that decreases is clamped to the starts that the search has read on its way. These are
// the same in every search that gets there, so any starts are searched like starts that do not
// decrease, and every row block is found once. Row blocks that wait for earlier ones of their
// sequence need that.
struct Bisection {
  template <class Rows, class IsAfter>
  FLASH_HD SequencePlace operator()(int count, Rows const& rows, IsAfter is_after) const {
    int low = 0, high = count;  // low: not after, high: after
    int low_start = 0, high_start = rows.start(count);
    while (high - low > 1) {
      int const middle = low + (high - low) / 2;
      int start = rows.start(middle);
      start = start > low_start ? start : low_start;
      start = start < high_start ? start : high_start;
      bool const after = is_after(middle, start);
      (after ? high : low) = middle;
      (after ? high_start : low_start) = start;
    }
    return {low, low_start, high_start};
  }
};

// Lengths are known only on the device. Fixed by the host, which knows the total number of rows and
// must not wait for the lengths.
//
// Sequence b, before which start(b) rows come, owns the row blocks from first_block(b) = start(b) /
// block_m + b on. These are enough: with start(b) = x * block_m + r, first_block(b + 1) -
// first_block(b) = (r + length) / block_m + 1 >= ceil(length / block_m). So no prefix sum over
// lengths is needed, and a tile finds its sequence by bisection. The surplus blocks, at most one or
// two a sequence, are invalid tiles.
//
// Where another kernel computes the sequences of up to `few` rows, a block for each of them would
// be too many if they are most of a batch. Without these blocks, first_block(b) = start(b) / w: a
// sequence of k * block_m + 1 rows or more has k + 1 blocks if w <= (block_m + 1) / 2, and a
// sequence of few + 1 rows has one block if w <= few + 1.
struct VarlenTiles {
  int64_t total_q;  // rows of all sequences together
  int block_m;
  int heads;  // query heads
  int batch;  // sequences
  TileOrder order;
  int rows_apart;   // rows from the number of one block to the next
  int shared_till;  // sequences before this one have no block for themselves
  int64_t tiles;    // kept: a GPU divides 64 bits in the time of a load from L2

  static VarlenTiles of(int64_t total_q, int block_m, int heads, int batch, TileOrder order) {
    return counted({total_q, block_m, heads, batch, order, block_m, 0, 0});
  }

  // Without blocks for those of the first `sequences` sequences that have up to `few` rows.
  static VarlenTiles of(int64_t total_q, int block_m, int heads, int batch, TileOrder order,
                        int few, int sequences) {
    int const half = (block_m + 1) / 2, rows_apart = few < half ? few + 1 : half;
    return counted({total_q, block_m, heads, batch, order, rows_apart, sequences, 0});
  }

  template <class Index>
  FLASH_HD Index first_block(int sequence, Index start) const {
    return start / rows_apart + (sequence > shared_till ? sequence - shared_till : 0);
  }
  FLASH_HD int64_t num_tiles() const { return tiles; }

 private:
  static VarlenTiles counted(VarlenTiles all) {
    all.tiles = all.first_block(all.batch, all.total_q) * all.heads;
    return all;
  }
};

// Sequences run in order; inside one, all heads and row blocks run in the dense order.
// Rows: like RowOrder. Search: finds a tile's sequence, like Bisection.
template <class Index, class Rows, class Search = Bisection>
FLASH_HD WorkTile find_tile(VarlenTiles s, Rows rows, Index index, Search search = {}) {
  if (index >= s.num_tiles()) return {0, 0, 0, false};
  int const row_block = int(index / s.heads);
  SequencePlace const place = search(s.batch, rows, [&](int sequence, int start) {
    return s.first_block(sequence, start) > row_block;
  });
  int const sequence = place.sequence;
  int const first = s.first_block(sequence, place.start);
  int const end = s.first_block(sequence + 1, place.next_start);
  // If starts decrease, a search other than Bisection may end beside the row block.
  if (row_block < first || row_block >= end) return {0, 0, sequence, false};
  auto const [m_block, head] =
      tile_at<Index>(s.order, index - Index(first) * s.heads, end - first, s.heads);
  int const length = rows.wanted(sequence, place.next_start - place.start);
  return {m_block, int(head), sequence, m_block * s.block_m < length};
}

}  // namespace flash
