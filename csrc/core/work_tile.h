// A tile, and the order of tiles in a rectangle of row blocks and heads.
#pragma once

#include <cstdint>
#include <type_traits>

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

// The order in which tiles of a rectangle (row blocks x strips) run. A strip is one head of one
// batch entry, and all row blocks of a strip read the same K and V.
struct TileOrder {
  int group;           // strips that run side by side, so many that their K and V fit in L2
  bool longest_first;  // causal: the last row block sees most keys, so it starts before the short
                       // ones, which then fill the tail of the launch
};

template <class Index>
struct RectangleTile {
  int m_block;
  Index strip;
};

// With group = 1 all row blocks of a strip come before the next strip. A wider group goes through
// its strips first: all last row blocks, then all next-to-last ones, ...
// Index: int for a launch whose tiles it can count; a 64-bit division takes twenty registers, which
// a kernel may not have to spare.
template <class Index = int64_t>
FLASH_HD RectangleTile<Index> tile_at(TileOrder order, std::type_identity_t<Index> index,
                                      int m_blocks, std::type_identity_t<Index> strips) {
  Index const tiles_per_group = Index(order.group) * m_blocks;
  Index const group = index / tiles_per_group;
  Index const first_strip = group * order.group;
  Index const strips_left = strips - first_strip;
  Index const width = strips_left < order.group ? strips_left : order.group;

  Index const in_group = index - group * tiles_per_group;
  Index const row = in_group / width;
  int const m_block = order.longest_first ? int(m_blocks - 1 - row) : int(row);
  return {m_block, first_strip + (in_group - row * width)};
}

}  // namespace flash
