// The KV-persistent schedule: a CTA, or a pair, has the KV blocks of one sequence and head, one
// after the other. Also which sums of dQ an iteration uses, here and with ordered dQ.
#pragma once

#include "core/varlen_rows.h"
#include "sm90/backward/dq_action.h"

namespace flash::sm90::backward {

// The first tile of the number-th sequence and head.
__device__ inline WorkTile first_tile_of(BwdParams const& p, uint32_t number) {
  Seqlens const& s = p.seqlens;
  uint32_t const heads = p.heads_kv * p.gqa.splits;
  int const sequence = static_cast<int>(number / heads), head = static_cast<int>(number % heads);
  if (!s.cu_k) {
    return {0, head, sequence, true};
  }
  int const ordered = p.workspace.order ? p.workspace.order[sequence] : sequence;
  VarlenRows const keys{s.cu_k, s.batch, static_cast<int>(s.total_k)};
  return {0, head, ordered, keys.run(ordered).length > 0};
}

// The CTA's own sums for a row block; row blocks beyond the caller's lengths share the last one's.
template <class Config>
__device__ int own_sums(BwdParams const& p, int head, int m_block) {
  int const rows = p.kv_persistent.row_blocks;
  int const resident = static_cast<int>(blockIdx.x) / Config::kAdders;
  int const heads = resident * p.gqa.split_heads + head;
  return heads * rows + min(m_block, rows - 1);
}

// With ordered dQ there are sums of all row blocks, numbered as these are.
template <class Config>
__device__ DqIteration dq_iteration(BwdParams const& p, KeyBlock<Config> const& block,
                                    RowIteration const& rows) {
  int const sums = Config::kOrderedDq ? static_cast<int>(rows.row_block)
                                      : own_sums<Config>(p, rows.head, rows.m_block);
  return {rows, dq_action(p, block, rows.m_block), sums};
}

}  // namespace flash::sm90::backward
