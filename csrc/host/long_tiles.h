// Which tile a row of Hopper's forward takes.
#pragma once

#include <string_view>

#include "host/head_packing.h"
#include "host/variant.h"

namespace flash {

// Whether longer tiles pay, of which short rows leave more unused, and hide less behind each other.
inline bool sees_many_keys(FwdParams const& p, int many) {
  // An average length says nothing about one sequence.
  bool const may = !p.pages.table && !(p.batch_invariant && p.seqlens.cu_q);
  return may && keys_seen(p) >= many;
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
