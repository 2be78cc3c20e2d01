// What a main kernel reads of a row: LSE and D = rowsum(dO * O) - dLSE.
#pragma once

#include <cmath>

#include "core/softmax.h"
#include "passes/backward/passes.h"

namespace flash {

struct RowPlace {
  WorkTile tile;
  int64_t row;
  int64_t row_block;  // in the workspace
  int in_block;
};

// exists: the row belongs to a sequence, and has an LSE.
__device__ inline float lse_of(BwdParams const& p, RowPlace const& at, bool exists) {
  return exists ? *p.lse.at(at.tile.batch, at.row, at.tile.head) : -INFINITY;
}

// Writes the row's stats and softmax_d. dot: dO * O
__device__ inline void write_row(BwdParams const& p, QueryTile const& shape, RowPlace const& at,
                                 bool exists, bool is_sequence, float lse, float dot) {
  int const batch = at.tile.batch, head = at.tile.head;
  float d = dot;
  if (exists) {
    d -= is_sequence && p.dlse.ptr ? *p.dlse.at(batch, at.row, head) : 0.f;
    *p.softmax_d.at(batch, at.row, head) = d;
  }
  if (!is_sequence) {
    return;
  }
  // exp2(x - inf) = 0: rows without keys, and those that do not exist, need no predicate. Under
  // dropout the kept part of dP is not divided by 1 - p; D is multiplied by it instead.
  bool const empty = lse == -INFINITY;
  float* const stats = p.workspace.stats + at.row_block * (2 * shape.block_m);
  stats[at.in_block] = empty ? INFINITY : lse * kLog2e - shape.unit_log2;
  stats[shape.block_m + at.in_block] =
      empty ? 0.f : d * (1.f - p.scores.dropout_p) * exp2f(-shape.unit_log2);
}

// The order in which tiles with ordered dQ reach the row blocks of a dense call: batch entry by
// batch entry, head by head, from the last row block to the first.
struct RowBlockOrder {
  int heads;
  int batch;
  int row_blocks;  // of a sequence

  FLASH_HD RowBlockOrder(BwdParams const& p, int block_m)
      : heads(p.heads_q),
        batch(p.seqlens.batch),
        row_blocks(num_blocks(p.seqlens.seqlen_q, block_m)) {}

  FLASH_HD int all_heads() const { return heads * batch; }
  FLASH_HD int count() const { return all_heads() * row_blocks; }

  // The number-th row block; not valid after the last one.
  FLASH_HD WorkTile at(int number) const {
    int const head = number / row_blocks, before = number - head * row_blocks;
    int const entry = head / heads;
    return {row_blocks - 1 - before, head - entry * heads, entry, number < count()};
  }

  // Index in the workspace, as RowBlocks numbers row blocks.
  FLASH_HD int64_t index(WorkTile const& tile) const {
    return (int64_t(tile.head) * batch + tile.batch) * row_blocks + tile.m_block;
  }
};

}  // namespace flash
