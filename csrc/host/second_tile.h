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
  bool const may = !(p.batch_invariant && p.seqlens.cu_q);
  bool const windowed = limits(p.mask.left, p.seqlens);
  return may && keys_seen(p) * (windowed ? 1 : skew(p.seqlens)) >= many;
}

// Keys of a tile for which a kernel of any keys loads pages; a longer one has a kernel of its own.
inline constexpr int kMostPagedKeys = 128;

// Whether that has boxes with all columns of these pages, and pays: pages of a multiple of 64 keys
// make so few others that longer tiles gain nothing (on an H200 0 to 1% either way; of 16, 5 to
// 9%).
inline bool suit_long_tiles(FwdParams const& p, int head_dim, int head_dim_v) {
  constexpr int kLarge = 64, kBox = 8;
  // Beside decode memory is what all wait for.
  if (p.pages.page_size.divisor % kLarge == 0 || p.seqlens.few_q > 0) {
    return false;
  }
  return p.head_dim == head_dim && p.head_dim_v == head_dim_v && p.k.whole_rows_apart(kBox) &&
         p.v.whole_rows_apart(kBox);
}

// Keys of a tile of the row's that serves a call.
inline int keys_of_tile(Variant const& row, FwdParams const& p) {
  bool const plain = std::string_view(row.scores) == "plain";
  bool const serves = !p.pages.table || (row.long_block_n > kMostPagedKeys &&
                                         suit_long_tiles(p, row.head_dim, row.head_dim_v));
  bool const is_long = row.long_block_n > 0 && serves && p.splits.count.divisor <= 1 &&
                       packed_queries(p, row.block_m, plain) == 0 &&
                       sees_many_keys(p, row.long_from);
  return is_long ? row.long_block_n : row.block_n;
}

}  // namespace flash
