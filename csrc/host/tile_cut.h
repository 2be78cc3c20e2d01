// Whether a backward on Hopper cuts its tiles along the rows.
#pragma once

#include <string_view>

#include "core/tile_cut.h"
#include "host/group_parts.h"
#include "host/key_columns.h"

namespace flash {

// Parts of tiles that the memory has room for which sums of parts may take: as parts of groups'.
inline int64_t most_slots(BwdParams const& p, Variant const& variant) {
  int64_t const slot =
      int64_t(sizeof(float)) * variant.block_n * (variant.head_dim + variant.head_dim_v);
  return static_cast<int64_t>(most_sum_bytes(p, variant)) / slot;
}

// Of a call whose groups are in parts already. By the call and the GPU alone, whatever is wanted
// and in whatever order: what goes in columns or a relay for dQ's sake is not cut without it,
// either.
inline CutTiles cut_tiles(BwdParams const& p, Variant const& variant, DeviceInfo const& device,
                          bool deterministic) {
  Seqlens const& s = p.seqlens;
  bool const has_kernel =
      variant.arch == 90 &&
      cuts_tiles(variant.head_dim, variant.head_dim_v, std::string_view(variant.scores) == "plain");
  if (!has_kernel || deterministic || s.cu_q || s.cu_k || p.group.parts > 1 || p.heads_q == 0 ||
      num_keys(s) == 0 || s.seqlen_q == 0 || suits_relay(p, variant, device, deterministic) ||
      suits_columns(p, variant, device, deterministic)) {
    return {};
  }
  GroupTiles tiles = group_tiles(p, variant.block_n);
  if (limits(p.mask.right, s)) {  // the first keys are seen by no more rows
    tiles.most = std::min(tiles.most, double(s.seqlen_k) + p.mask.right);
  }
  CutLimits const by{backward_places(variant, device), variant.block_m, most_slots(p, variant)};
  int const parts = best_row_parts(tiles, by);
  return parts > 1 ? CutTiles::last(0, static_cast<int>(tiles.count), parts) : CutTiles{};
}

}  // namespace flash
