// What a KV block does with the dQ of a row block that it sees, in schedules where the first and
// the last KV block differ from the others: KV-persistent and ordered dQ.
#pragma once

#include "core/dq_order.h"
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

}  // namespace flash::sm90::backward
