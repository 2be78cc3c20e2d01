// Whether a thread block of Hopper's backward, or a pair, takes the blocks of keys of a sequence
// one after the other.
#pragma once

#include <algorithm>
#include <string_view>

#include "host/key_relay.h"

namespace flash {

// Blocks of keys that a thread block, or a pair, goes through, with all rows that see them.
inline GroupTiles column_tiles(BwdParams const& p, GroupTiles const& tiles, int block_n) {
  Seqlens const& s = p.seqlens;
  double const batch = std::max(s.batch, 1);
  double const keys = s.cu_k ? s.total_k / batch : s.seqlen_k;
  auto const in_column = [&](double rows, double length) {
    int const blocks = std::max(num_m_blocks(int(length + 0.5), block_n), 1);
    return blocks * rows + (blocks - 1) * kTileRows / p.group.part_heads;
  };
  GroupTiles columns{tiles.heads, int64_t(s.batch) * p.heads_kv, in_column(tiles.rows, keys), 0};
  columns.most = s.cu_q || s.cu_k ? in_column(tiles.most, std::min<double>(s.seqlen_k, num_keys(s)))
                                  : columns.rows;
  return columns;
}

// Sequences that are put in order, in the time of as many steps for each; of more, the last to be
// done has little to do.
constexpr int kMostOrdered = 4096;

// Rows of all heads that thread blocks work on at a time, on average. Under a causal mask a block
// of keys sees but the rows from its own on; the longest of a packed call come together.
inline double rows_at_work(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  Seqlens const& s = p.seqlens;
  double const longest = std::min<double>(s.seqlen_q, s.cu_q ? s.total_q : s.seqlen_q);
  double const rows = s.cu_q ? (longest + double(s.total_q) / std::max(s.batch, 1)) / 2 : longest;
  double const blocks = std::max(num_m_blocks(s.seqlen_k, variant.block_n), 1);
  bool const limited = limits(p.mask.left, s) || limits(p.mask.right, s);
  double const seen = limited ? (blocks + 1) / (2 * blocks) : 1;
  return seen * rows * p.group.part_heads * backward_places(variant, device);
}

// Whether L2 holds what all thread blocks come back to for each block of keys: Q, dO and sums of
// columns of their own. On an H200 41 of its 60 MiB gain (d 128, 512 keys, causal: 12%), 50 lose
// (d 96, full: 3%), but not in a packed call, whose tiles are searched for (d 128, 256 keys on
// average, full: +3%).
inline bool rows_fit(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  double const kShare = p.seqlens.cu_k ? 0.85 : 0.75;
  double const row_bytes =
      sizeof(float) * variant.head_dim + 2. * (variant.head_dim + variant.head_dim_v);
  return rows_at_work(p, variant, device) * row_bytes <= kShare * double(device.l2_bytes);
}

inline KeyColumns in_columns(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  Seqlens const& s = p.seqlens;
  int64_t const rows = s.cu_q ? std::min<int64_t>(s.seqlen_q, s.total_q) : s.seqlen_q;
  int const row_blocks = num_m_blocks(static_cast<int>(rows), variant.block_m);
  return {backward_places(variant, device), std::max(row_blocks, 1),
          s.cu_k && s.batch <= kMostOrdered};
}

// Whether columns end sooner than tiles, whose sums have a pass before and one behind, and turns if
// they are to be deterministic.
inline bool columns_pay(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                        bool deterministic) {
  // Rows against a block of keys in the time that those passes take for one. At 512 keys on an H200
  // they have 85 of 520 us (d 64), 82 of 430 (d 128); turns at least as much.
  constexpr double kSums = 0.75, kTurns = 1;
  int const places = backward_places(variant, device);
  GroupTiles const tiles = group_tiles(p, variant.block_n);
  GroupTiles const columns = column_tiles(p, tiles, variant.block_n);
  Seqlens const& s = p.seqlens;
  double const rows = (s.cu_q ? double(s.total_q) : double(s.batch) * s.seqlen_q) * p.heads_q;
  double const sums = rows / places * (kSums + (deterministic ? kTurns : 0));
  return rows_until_done(columns, p.group.part_heads, places) <
         rows_until_done(tiles, p.group.part_heads, places) + sums;
}

// Of more blocks of keys the passes before and behind are too small a part: d 64, 1,024 keys,
// causal: -1% on an H200.
constexpr int kMostColumnBlocks = 4;

// Whether a call whose groups are in parts already has a kernel for columns, and they are faster if
// dQ is wanted. A relay is faster still. By what is said of
// lengths: of one block of keys there is nothing to add up, but a packed call's columns need no
// search.
inline bool suits_columns(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                          bool deterministic) {
  Seqlens const& s = p.seqlens;
  bool const has_kernel = variant.arch == 90 && std::string_view(variant.scores) == "plain";
  if (!has_kernel || num_keys(s) == 0 || p.heads_q == 0 ||
      num_m_blocks(s.seqlen_k, variant.block_n) > kMostColumnBlocks ||
      suits_relay(p, variant, device, deterministic)) {
    return false;
  }
  return s.seqlen_k <= variant.block_n
             ? s.cu_k != nullptr
             : rows_fit(p, variant, device) && columns_pay(p, variant, device, deterministic);
}

inline KeyColumns key_columns(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                              bool deterministic) {
  bool const adds = p.dq.ptr || p.seqlens.seqlen_k <= variant.block_n;
  return adds && suits_columns(p, variant, device, deterministic) ? in_columns(p, variant, device)
                                                                  : KeyColumns{};
}

}  // namespace flash
