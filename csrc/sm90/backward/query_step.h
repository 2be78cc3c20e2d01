// What a key block does with the dQ of a row block that it sees, where the first and the last one
// differ from the others: in columns and in relays.
#pragma once

#include "core/dq_order.h"
#include "sm90/backward/key_block.h"

namespace flash::sm90 {

enum class QueryStep : uint8_t {
  Nothing,  // it is not wanted
  Add,      // to sums
  Put,      // there first
  Finish,   // and what is there already is dq
  Store,    // alone it is dq
};

struct StepVisit : RowVisit {
  QueryStep step;
  int sums;  // which: of a relay those of the row block, in a column a thread block's own
};

template <class Config>
__device__ KeyTurn turn_of(KeyBlock<Config> const& block, int m_block) {
  int const row_begin = m_block * Config::kBlockM;
  int const row_last = min(row_begin + Config::kBlockM, block.seqlen_q) - 1;
  return key_turn(block.mask, row_begin, row_last, block.key_begin, Config::kBlockN);
}

template <class Config>
__device__ QueryStep query_step(BwdParams const& p, KeyBlock<Config> const& block, int m_block) {
  if (!p.workspace.dq) {
    return p.dq.ptr ? QueryStep::Store : QueryStep::Nothing;
  }
  KeyTurn const turn = turn_of(block, m_block);
  if (turn.first()) {
    return turn.last ? QueryStep::Store : QueryStep::Put;
  }
  return turn.last ? QueryStep::Finish : QueryStep::Add;
}

}  // namespace flash::sm90
