// What a KV block does with the dQ of a row block that it sees, in schedules where the first and
// the last KV block differ from the others: KV-persistent and ordered dQ.
#pragma once

#include "sm90/backward/key_block.h"

namespace flash::sm90::backward {

enum class DqAction : uint8_t {
  Nothing,  // dQ is not wanted
  Add,      // to the sums
  Put,      // it is the first of the sums
  Finish,   // with the sums it is dq
  Store,    // on its own it is dq
};

struct DqIteration : RowIteration {
  DqAction action;
  int sums;  // which: with ordered dQ the row block's, else the CTA's own
};

template <class Config>
__device__ DqOrder dq_order_of(KeyBlock<Config> const& block, int m_block) {
  int const row_begin = m_block * Config::kBlockM;
  int const row_last = min(row_begin + Config::kBlockM, block.seqlen_q) - 1;
  return dq_order(block.mask, row_begin, row_last, block.key_begin, Config::kBlockN);
}

template <class Config>
__device__ DqAction dq_action(BwdParams const& p, KeyBlock<Config> const& block, int m_block) {
  if (!p.workspace.dq) {
    return p.dq.ptr ? DqAction::Store : DqAction::Nothing;
  }
  DqOrder const order = dq_order_of(block, m_block);
  if (order.first()) {
    return order.last ? DqAction::Store : DqAction::Put;
  }
  return order.last ? DqAction::Finish : DqAction::Add;
}

// The own sums of a CTA of the KV-persistent schedule for a row block; row blocks beyond the
// caller's lengths share the last one's.
template <class Config>
__device__ int own_sums(BwdParams const& p, int head, int m_block) {
  int const rows = p.kv_persistent.row_blocks;
  int const resident = static_cast<int>(blockIdx.x) / Config::kAdders;
  int const heads = resident * p.gqa.split_heads + head;
  return heads * rows + min(m_block, rows - 1);
}

// Ordered dQ has a sum for each row block of the call, with the row block's number.
template <class Config>
__device__ DqIteration dq_iteration(BwdParams const& p, KeyBlock<Config> const& block,
                                    RowIteration const& rows) {
  int const sums = Config::kOrderedDq ? static_cast<int>(rows.row_block)
                                      : own_sums<Config>(p, rows.head, rows.m_block);
  return {rows, dq_action(p, block, rows.m_block), sums};
}

}  // namespace flash::sm90::backward
