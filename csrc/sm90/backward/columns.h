// Columns: a thread block's, or a pair's, blocks of keys of one sequence, one after the other, and
// where the sums of dQ are that they share.
#pragma once

#include "core/packed_rows.h"
#include "sm90/backward/key_block.h"

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
  PackedRows const keys{s.cu_k, s.batch, static_cast<int>(s.total_k)};
  return {0, head, sequence, keys.run(sequence).length > 0};
}

// What the key block does with the dQ of a row block that it sees.
template <class Config>
__device__ QueryStep query_step(BwdParams const& p, KeyBlock<Config> const& block, int m_block) {
  if (!p.workspace.dq) {
    return p.dq.ptr ? QueryStep::Store : QueryStep::Nothing;
  }
  int const row_begin = m_block * Config::kBlockM;
  int const row_last = min(row_begin + Config::kBlockM, block.seqlen_q) - 1;
  bool const first = block.mask.begin(row_begin) >= block.key_begin;
  bool const last = block.mask.end(row_last) <= block.key_begin + Config::kBlockN;
  if (first) {
    return last ? QueryStep::Store : QueryStep::Put;
  }
  return last ? QueryStep::Finish : QueryStep::Add;
}

// Numbers the sums of a column's row blocks; those that were not expected share the last one's.
template <class Config>
__device__ int column_sums(BwdParams const& p, int head, int m_block) {
  int const rows = p.columns.row_blocks;
  int const place = static_cast<int>(blockIdx.x) / Config::kAdders;
  int const heads = place * p.group.part_heads + head;
  return heads * rows + min(m_block, rows - 1);
}

template <class Config>
__device__ ColumnVisit column_visit(BwdParams const& p, KeyBlock<Config> const& block,
                                    RowVisit const& rows) {
  return {rows, query_step(p, block, rows.m_block),
          column_sums<Config>(p, rows.head, rows.m_block)};
}

}  // namespace flash::sm90
