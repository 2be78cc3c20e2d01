// Whether the query heads of a KV head share row blocks.
#pragma once

#include <algorithm>

#include "core/work_tile.h"
#include "host/tile_order.h"
#include "params/fwd_params.h"

namespace flash {

// Queries of an average sequence.
inline double average_queries(Seqlens const& s) {
  return s.cu_q ? double(s.total_q) / std::max(s.batch, 1) : s.seqlen_q;
}

// Keys that one of them sees, on average.
inline double keys_seen(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  double const rows = average_queries(s);
  double const keys = s.cu_k && !s.in_pages ? double(s.total_k) / std::max(s.batch, 1) : s.seqlen_k;
  double const seen = limits(p.mask.right, s) ? std::max(keys - rows / 2, keys / 2) : keys;
  return limits(p.mask.left, s)
             ? std::min<double>(seen, p.mask.left + 1 + std::max(p.mask.right, 0))
             : seen;
}

// Keys that the row blocks of a forward go through, all in all, in an average sequence. What begins
// and ends a row block takes as long as a hundred keys. With limits, a row block goes through the
// keys of all its queries: with fewer queries it wastes less on those that only some of them see.
inline double keys_visited(FwdParams const& p, ForwardTile const& tile) {
  constexpr double kRowBlockKeys = 100;
  Seqlens const& s = p.seqlens;
  double const rows = average_queries(s);
  bool const limited = limits(p.mask.left, s) || limits(p.mask.right, s);
  double const span = limited ? std::min<double>(tile.block_m, rows) : 0;
  double const blocks = num_m_blocks(static_cast<int>(rows + 0.5), tile.block_m);
  return tile.heads * blocks * (keys_seen(p) + span + kRowBlockKeys);
}

// The tile to take of the two that hold as many rows: each query with one head, or with all that
// share a KV head. Equals stay apart: their stores are simpler.
inline ForwardTile better_tile(FwdParams const& p, int block_m, int packed_block_m) {
  constexpr double kGain = 0.95;
  ForwardTile const apart{block_m, p.heads_q}, packed{packed_block_m, p.heads_kv};
  // The average length of a packed batch says what pays, not what a single sequence would choose.
  bool const may =
      packed_block_m > 0 && p.heads_q > p.heads_kv && !(p.batch_invariant && p.seqlens.cu_q);
  bool const pays = may && keys_visited(p, packed) < kGain * keys_visited(p, apart);
  return pays ? packed : apart;
}

// Of a row block of Hopper's forward: the queries that 64 of its rows are, if each is there with
// all heads that share its KV head; 0: a row is a query.
inline int packed_queries(FwdParams const& p, int block_m, bool plain) {
  constexpr int kRows = 64;
  int const group = p.heads_q / std::max(p.heads_kv, 1);
  // Hooks look at one head a row block, and a box needs heads that are apart.
  bool const can = plain && group > 1 && group <= kRows && p.q.head_stride != 0;
  int const queries = can ? kRows / group : 0;
  return better_tile(p, block_m, block_m / kRows * queries).block_m == block_m ? 0 : queries;
}

}  // namespace flash
