// Columns: a thread block's, or a pair's, blocks of keys of one sequence, one after the other, and
// which sums of dQ a iteration is about, there and in relays.
#pragma once

#include "core/varlen_rows.h"
#include "sm90/backward/dq_action.h"

namespace flash::sm90::backward {

// The number-th column's first tile.
__device__ inline WorkTile first_tile_of(BwdParams const& p, uint32_t number) {
  Seqlens const& s = p.seqlens;
  uint32_t const heads = p.heads_kv * p.gqa.splits;
  int const column = static_cast<int>(number / heads), head = static_cast<int>(number % heads);
  if (!s.cu_k) {
    return {0, head, column, true};
  }
  int const sequence = p.workspace.order ? p.workspace.order[column] : column;
  VarlenRows const keys{s.cu_k, s.batch, static_cast<int>(s.total_k)};
  return {0, head, sequence, keys.run(sequence).length > 0};
}

// Numbers the sums of a column's row blocks; those that were not expected share the last one's.
template <class Config>
__device__ int own_sums(BwdParams const& p, int head, int m_block) {
  int const rows = p.kv_persistent.row_blocks;
  int const place = static_cast<int>(blockIdx.x) / Config::kAdders;
  int const heads = place * p.gqa.split_heads + head;
  return heads * rows + min(m_block, rows - 1);
}

// In a relay there are sums of all row blocks, numbered as these are.
template <class Config>
__device__ DqIteration dq_iteration(BwdParams const& p, KeyBlock<Config> const& block,
                                RowIteration const& rows) {
  int const sums = Config::kOrderedDq ? static_cast<int>(rows.row_block)
                                  : own_sums<Config>(p, rows.head, rows.m_block);
  return {rows, dq_action(p, block, rows.m_block), sums};
}

}  // namespace flash::sm90::backward
