// Which tile a row of Hopper's forward takes, of the two that it may have.
#pragma once

#include <algorithm>
#include <string_view>

#include "core/row_block_cost.h"
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

// Whether every sequence is as long as the longest, as far as the host knows.
inline bool are_alike(Seqlens const& s) {
  bool const queries = !s.cu_q || s.total_q == int64_t(s.batch) * s.seqlen_q;
  bool const keys = !s.cu_k || s.in_pages || s.total_k == int64_t(s.batch) * s.seqlen_k;
  return queries && keys;
}

// Tiles of keys that a row block goes through, on average. Where lengths are unknown, a limit cuts
// through the middle of a tile, and a limit of the mask is half a row block away from what an
// average row sees.
inline double average_steps(FwdParams const& p, int block_m, int block_n) {
  Seqlens const& s = p.seqlens;
  bool const left = limits(p.mask.left, s), right = limits(p.mask.right, s);
  if (are_alike(s)) {
    // Whatever was said, sums of a few are ints.
    auto const clamped = [](int x) { return std::min(x, 1 << 29); };
    int const rows = clamped(s.seqlen_q), keys = clamped(s.seqlen_k);
    Mask const mask{left ? clamped(p.mask.left) : -1, right ? clamped(p.mask.right) : -1};
    return mean_steps(SequenceMask(mask, rows, keys), rows, block_m, block_n);
  }
  double const away = (left + right) * std::min<double>(block_m, average_queries(s)) / 2;
  double const keys = keys_seen(p) * (left ? 1 : skew(s)) + away;
  return keys / block_n + (left ? 1 : 0.5);
}

// Whether tiles of second_n keys take less time than the row's.
inline bool second_tile_pays(FwdParams const& p, KeyTile const& tile, int second_n) {
  // An average length says nothing about one sequence.
  if (p.batch_invariant && p.seqlens.cu_q) {
    return false;
  }
  auto const cost = [&](KeyTile const& t) {
    return row_block_cost(average_steps(p, t.block_m, t.block_n), t);
  };
  return cost(tile.with(second_n)) < cost(tile);
}

// Keys of a tile for which a kernel of any keys loads pages; a longer one has a kernel of its own.
inline constexpr int kMostPagedKeys = 128;

// Whether that has boxes with all columns of these pages, and pays (on an H200 2 to 9%).
inline bool suit_long_tiles(FwdParams const& p, int head_dim, int head_dim_v) {
  constexpr int kBox = 8;
  // Beside decode memory is what all wait for.
  if (p.seqlens.few_q > 0) {
    return false;
  }
  return p.head_dim == head_dim && p.head_dim_v == head_dim_v && p.k.whole_rows_apart(kBox) &&
         p.v.whole_rows_apart(kBox);
}

// Keys of a tile of the row's that serves a call.
inline int keys_of_tile(Variant const& row, FwdParams const& p) {
  bool const plain = std::string_view(row.scores) == "plain";
  KeyTile const tile{row.head_dim, row.head_dim_v, row.block_m, row.block_n, row.stages};
  bool const serves = !p.pages.table || (row.second_block_n > kMostPagedKeys &&
                                         suit_long_tiles(p, row.head_dim, row.head_dim_v));
  bool const second = row.second_block_n > 0 && serves && p.splits.count.divisor <= 1 &&
                      packed_queries(p, row.block_m, plain) == 0 &&
                      second_tile_pays(p, tile, row.second_block_n);
  return second ? row.second_block_n : row.block_n;
}

}  // namespace flash
