#pragma once

#include <cstdint>

#include "params/common.h"

namespace flash {

// One unit of forward work: block_m query rows of one head of one batch entry.
struct WorkTile {
  int m_block;  // row block inside the sequence
  int head;     // query head
  int batch;    // batch entry, or sequence of a varlen batch
  bool valid;   // false for the surplus tiles of an upper-bound grid
};

FLASH_HD int num_m_blocks(int seqlen_q, int block_m) {
  // Not (seqlen_q + block_m - 1) / block_m, which overflows for seqlen_q close to 2^31.
  return seqlen_q / block_m + (seqlen_q % block_m != 0);
}

// In which order tiles of a rectangle (row blocks x columns) run; a column is one head of one batch
// entry, and all row blocks of a column read the same K and V.
struct TileOrder {
  int group;           // columns that run side by side, so many that their K and V fit in L2
  bool longest_first;  // causal: the last row block sees most keys, so start it before the short
                       // ones, which then fill the tail of the launch
};

struct RectangleTile {
  int m_block;
  int64_t column;
};

// group = 1 walks the row blocks of one column after the other. A wider group walks its columns
// first: all last row blocks, then all next-to-last ones, ...
FLASH_HD RectangleTile tile_at(TileOrder order, int64_t index, int m_blocks, int64_t columns) {
  int64_t const tiles_per_group = int64_t(order.group) * m_blocks;
  int64_t const group = index / tiles_per_group;
  int64_t const first_column = group * order.group;
  int64_t const columns_left = columns - first_column;
  int64_t const width = columns_left < order.group ? columns_left : order.group;

  int64_t const in_group = index - group * tiles_per_group;
  int64_t const row = in_group / width;
  int const m_block = order.longest_first ? int(m_blocks - 1 - row) : int(row);
  return {m_block, first_column + (in_group - row * width)};
}

}  // namespace flash
