// Whether a backward on Hopper cuts its last tiles along the rows.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/tile_cut.h"
#include "host/group_parts.h"

namespace flash {

// EXPERIMENT. FLASH_ATTN_TRY_ROWS: "0" none; "P", "P,R", "P,all": what is beyond whole rounds, R
// rounds more, or all tiles, in P parts; else the rule.
inline TileCut forced_cut(char const* text, GroupTiles const& t, CutLimits const& by) {
  int const parts = std::atoi(text);
  char const* const comma = std::strchr(text, ',');
  bool const all = comma && std::strcmp(comma, ",all") == 0;
  int64_t const count =
      all ? t.count
          : std::min(t.count, t.count % by.places + (comma ? std::atoi(comma + 1) : 0) * by.places);
  int64_t const blocks = (int64_t(t.most) + by.block_m - 1) / by.block_m;
  int64_t const most = std::min(blocks, by.most_slots / std::max<int64_t>(count, 1));
  TileCut const cut{count, static_cast<int>(std::min<int64_t>(parts, most))};
  return count == 0 || cut.parts < 2 ? TileCut{} : cut;
}

// Of a call whose groups and columns are known. By the call and the GPU alone, whatever is wanted
// and in whatever order.
inline CutTiles cut_tiles(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  Seqlens const& s = p.seqlens;
  if (variant.arch != 90 || s.cu_q || s.cu_k || p.columns.used() || p.group.parts > 1 ||
      p.heads_q == 0 || num_keys(s) == 0 || s.seqlen_q == 0) {
    return {};
  }
  GroupTiles tiles = group_tiles(p, variant.block_n);
  int64_t const slots = most_parts(p, variant) * num_keys(s) * p.heads_kv / variant.block_n;
  CutLimits const by{backward_places(variant, device), variant.block_m, slots};
  if (tiles.count >= max_grid_blocks / 2) {
    return {};
  }
  char const* const text = std::getenv("FLASH_ATTN_TRY_ROWS");
  TileCut const cut = text && *text ? forced_cut(text, tiles, by) : best_cut(tiles, by);
  if (std::getenv("FLASH_ATTN_TRY_SHOW")) {
    std::fprintf(stderr, "cut: %ld tiles, %d places, last %ld in %d parts\n", long(tiles.count),
                 by.places, long(cut.count), cut.parts);
  }
  return cut.count == 0 ? CutTiles{}
                        : CutTiles::last(static_cast<int>(tiles.count - cut.count),
                                         static_cast<int>(cut.count), cut.parts);
}

}  // namespace flash
