// Which tile a row of Hopper's forward takes.
#pragma once

#include <algorithm>
#include <string_view>

#include "host/head_packing.h"
#include "host/variant.h"

namespace flash {

// How much longer the sequence of an average key is than an average sequence, at least: as if all
// but the longest were alike. 1 where the longest is said to have all keys, or more: who says that
// does not know.
inline double skew(Seqlens const& s) {
  double const all = double(s.total_k), longest = s.seqlen_k;
  if (!s.cu_k || s.in_pages || s.batch < 2 || longest >= all) {
    return 1;
  }
  double const others = (all - longest) * (all - longest) / (s.batch - 1);
  return std::max(1., (longest * longest + others) / all / (all / s.batch));
}

// Whether longer tiles pay, of which short rows leave more unused, and hide less behind each other.
inline bool sees_many_keys(FwdParams const& p, int many) {
  // An average length says nothing about one sequence.
  bool const may = !p.pages.table && !(p.batch_invariant && p.seqlens.cu_q);
  bool const windowed = limits(p.mask.left, p.seqlens);
  return may && keys_seen(p) * (windowed ? 1 : skew(p.seqlens)) >= many;
}

// Keys of a tile of the row's that serves a call.
inline int keys_of_tile(Variant const& row, FwdParams const& p) {
  bool const plain = std::string_view(row.scores) == "plain";
  bool const is_long = row.long_block_n > 0 && p.splits.count.divisor <= 1 &&
                       packed_queries(p, row.block_m, plain) == 0 &&
                       sees_many_keys(p, row.long_from);
  return is_long ? row.long_block_n : row.block_n;
}

}  // namespace flash
