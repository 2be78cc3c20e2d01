// Into how many parts a backward cuts the query heads that share a KV head.
#pragma once

#include <algorithm>

#include "core/group_parts.h"
#include "host/places.h"
#include "host/tile_order.h"

namespace flash {

// Thread blocks, or clusters of them, that run at a time. Backward kernels use all registers that a
// thread can have.
inline int backward_places(Variant const& variant, DeviceInfo const& device) {
  constexpr int kWarps = 8;
  int const by_registers = kWarps / variant.warps;
  int const blocks = std::min(by_registers, blocks_by_shared_memory(variant, device));
  return std::max(device.sm_count * std::max(blocks, 1) / variant.cluster, 1);
}

// Lengths are those of an average sequence, except that the longest tile is the longest one's.
inline GroupTiles group_tiles(BwdParams const& p, int block_n) {
  Seqlens const& s = p.seqlens;
  double const batch = std::max(s.batch, 1);
  double const rows = s.cu_q ? s.total_q / batch : s.seqlen_q;
  double const keys = s.cu_k ? s.total_k / batch : s.seqlen_k;
  double const longest = s.cu_q ? std::min<double>(s.seqlen_q, s.total_q) : rows;
  GroupTiles tiles{p.heads_q / p.heads_kv, 0, rows, std::max(rows, longest)};
  tiles.count = int64_t(s.batch) * p.heads_kv * num_m_blocks(int(keys + 0.5), block_n);
  bool const left = limits(p.mask.left, s), right = limits(p.mask.right, s);
  if (left || right) {
    double const seen = rows <= keys ? rows - rows * rows / (2 * keys) : keys / 2;
    tiles.rows = std::min(rows, seen + block_n / 2);
  }
  if (left && right) {
    double const span = double(p.mask.left) + p.mask.right + block_n;
    tiles.most = std::min(tiles.most, span);
    tiles.rows = std::min(rows, tiles.most);
  }
  return tiles;
}

// Sums of parts take as much memory as those of dQ at most, or what nobody misses.
inline double most_sum_bytes(BwdParams const& p, Variant const& variant) {
  constexpr double kLittle = 32 << 20;
  Seqlens const& s = p.seqlens;
  double const rows = s.cu_q ? double(s.total_q) : double(s.batch) * s.seqlen_q;
  return std::max(sizeof(float) * rows * p.heads_q * variant.head_dim, kLittle);
}

inline int64_t most_parts(BwdParams const& p, Variant const& variant) {
  double const part = sizeof(float) * double(num_keys(p.seqlens)) * p.heads_kv *
                      (variant.head_dim + variant.head_dim_v);
  return static_cast<int64_t>(most_sum_bytes(p, variant) / part);
}

// By the call and the GPU alone, whatever is wanted and in whatever order: dK and dV have the same
// bits.
inline HeadGroup head_group(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  int const heads = std::max(p.heads_q / std::max(p.heads_kv, 1), 1);
  if (heads == 1 || num_keys(p.seqlens) == 0) {
    return HeadGroup::in_parts(heads, heads);
  }
  GroupTiles const tiles = group_tiles(p, variant.block_n);
  int const places = backward_places(variant, device);
  return HeadGroup::in_parts(heads, best_part_heads(tiles, places, most_parts(p, variant)));
}

}  // namespace flash
