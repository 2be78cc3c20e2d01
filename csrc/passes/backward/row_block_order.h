// The order in which tiles with ordered dQ reach the row blocks of a dense call: batch entry by
// batch entry, head by head, from the last row block to the first.
#pragma once

#include "core/work_tile.h"
#include "params/bwd_params.h"

namespace flash {

struct RowBlockOrder {
  int heads;
  int batch;
  int row_blocks;  // of a sequence

  FLASH_HD RowBlockOrder(BwdParams const& p, int block_m)
      : heads(p.heads_q),
        batch(p.seqlens.batch),
        row_blocks(num_m_blocks(p.seqlens.seqlen_q, block_m)) {}

  FLASH_HD int all_heads() const { return heads * batch; }
  FLASH_HD int count() const { return all_heads() * row_blocks; }

  // The number-th row block; not valid behind the last one.
  FLASH_HD WorkTile at(int number) const {
    int const head = number / row_blocks, before = number - head * row_blocks;
    int const entry = head / heads;
    return {row_blocks - 1 - before, head - entry * heads, entry, number < count()};
  }

  // Index in the workspace, as RowBlocks numbers row blocks.
  FLASH_HD int64_t place(WorkTile const& tile) const {
    return (int64_t(tile.head) * batch + tile.batch) * row_blocks + tile.m_block;
  }
};

}  // namespace flash
