// Columns: a thread block's, or a pair's, blocks of keys of one sequence, one after the other, and
// which sums of dQ a visit is about, there and in relays.
#pragma once

#include "core/varlen_rows.h"
#include "sm90/backward/query_step.h"

namespace flash::sm90 {

// The number-th column's first tile.
__device__ inline WorkTile first_of_column(BwdParams const& p, uint32_t number) {
  Seqlens const& s = p.seqlens;
  uint32_t const heads = p.heads_kv * p.group.parts;
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
__device__ int column_sums(BwdParams const& p, int head, int m_block) {
  int const rows = p.columns.row_blocks;
  int const place = static_cast<int>(blockIdx.x) / Config::kAdders;
  int const heads = place * p.group.part_heads + head;
  return heads * rows + min(m_block, rows - 1);
}

// In a relay there are sums of all row blocks, numbered as these are.
template <class Config>
__device__ StepVisit step_visit(BwdParams const& p, KeyBlock<Config> const& block,
                                RowVisit const& rows) {
  int const sums = Config::kRelay ? static_cast<int>(rows.row_block)
                                  : column_sums<Config>(p, rows.head, rows.m_block);
  return {rows, query_step(p, block, rows.m_block), sums};
}

}  // namespace flash::sm90
