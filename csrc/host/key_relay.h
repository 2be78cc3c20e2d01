// Whether key blocks of Hopper's backward hand sums of dQ on to each other.
#pragma once

#include <algorithm>
#include <limits>
#include <string_view>

#include "host/group_parts.h"

namespace flash {

// Blocks of keys that see a row, on average.
inline double blocks_that_see(BwdParams const& p, int block_n) {
  Seqlens const& s = p.seqlens;
  double const rows = std::max(s.seqlen_q, 1), keys = s.seqlen_k;
  double const blocks = num_m_blocks(s.seqlen_k, block_n);
  bool const left = limits(p.mask.left, s), right = limits(p.mask.right, s);
  if (left && right) {
    return std::min(blocks, (double(p.mask.left) + p.mask.right) / block_n + 1);
  }
  double const seen = rows <= keys ? keys - rows / 2 : keys * keys / (2 * rows);
  return left || right ? std::min(blocks, seen / block_n + 0.5) : blocks;
}

// So many, up to which a relay pays: it spares each row the zeros before and the pass behind, and
// costs each block that sees it a little. Pairs of d 256 have most to read when they finish sums;
// under a causal mask, where turns queue longest, they gain by it whenever there are turns anyway
// (docs/kernels/sm90_backward.md, Relays).
inline double most_in_relay(BwdParams const& p, Variant const& variant, bool deterministic) {
  constexpr double kBlocks = 16, kBlocksOf128 = 12, kWideBlocks = 5, kWideBlocksOfWindow = 10;
  bool const left = limits(p.mask.left, p.seqlens), right = limits(p.mask.right, p.seqlens);
  bool const window = left && right;
  if (variant.head_dim <= 192) {
    return (variant.head_dim == 128 ? kBlocksOf128 : kBlocks) + (window ? 1 : 0);
  }
  if (deterministic) {
    return left || right ? std::numeric_limits<double>::infinity() : kBlocks;
  }
  return window ? kWideBlocksOfWindow : kWideBlocks;
}

// Whether a call whose groups are in parts already is to be one, if dQ is wanted. Who has several
// heads' rows one after the other would wait at each of them; with few tiles all of a column's run
// at a time, and wait for each other; with few rows waiting is all they do. In packed calls it
// gains and loses.
inline bool suits_relay(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                        bool deterministic) {
  constexpr int kLeastRounds = 2, kLeastRowBlocks = 3;
  Seqlens const& s = p.seqlens;
  bool const has_kernel = variant.arch == 90 && std::string_view(variant.scores) == "plain";
  if (!has_kernel || s.cu_q || s.cu_k || p.heads_q == 0 || s.seqlen_k <= variant.block_n ||
      num_m_blocks(s.seqlen_q, variant.block_m) < kLeastRowBlocks || p.group.part_heads > 1) {
    return false;
  }
  int64_t const tiles = int64_t(s.batch) * p.heads_q * num_m_blocks(s.seqlen_k, variant.block_n);
  return tiles >= kLeastRounds * backward_places(variant, device) &&
         blocks_that_see(p, variant.block_n) <= most_in_relay(p, variant, deterministic);
}

// Whether every row of a dense call does: then there is none whose dQ is zero and whom no key block
// comes to. The first one sees least to the right.
inline bool all_rows_see_keys(BwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return p.mask.right < 0 || int64_t(s.seqlen_k) - s.seqlen_q + p.mask.right >= 0;
}

// In a relay that finds D: heads of which it is found before. Those that tiles come to `first`; and
// where tiles come to row blocks faster than D is found, so many that all others' is there in time.
// found: of the row blocks that tiles visit, those whose D is found meanwhile, each once for all
// blocks of keys that see it.
inline int heads_before(int heads, int first, double found) {
  return std::clamp(static_cast<int>((1 - found) * heads), std::min(first, heads), heads);
}

inline KeyRelay key_relay(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                          bool deterministic) {
  bool const used = p.dq.ptr && suits_relay(p, variant, device, deterministic);
  bool const finds_delta = used && relay_finds_delta(variant.head_dim) && all_rows_see_keys(p);
  return {used, deterministic, finds_delta};
}

}  // namespace flash
