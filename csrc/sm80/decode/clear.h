// Rows of a packed batch that belong to no sequence, or to one that is longer than the caller says:
// like rows that see no key.
#pragma once

#include "sm80/decode/packed_rows.h"

namespace flash::sm80 {

// Of all query heads of the tile's KV head, by all warps: a row of a head each at a time.
template <class Config>
__device__ void clear_rows(DecodeParams const& p, DecodeTile<Config> const& tile, int warp,
                           int lane) {
  using Element = typename Config::Element;
  constexpr int kChunk = 8;  // columns of a lane: 16 bytes
  int const group = static_cast<int>(p.group.divisor);
  for (int query = warp; query < tile.info.seqlen_q; query += Config::kWarps) {
    int64_t const row = tile.info.row_q + query;
    for (int head = tile.head_kv * group; head < (tile.head_kv + 1) * group; ++head) {
      auto* const out =
          static_cast<Element*>(p.fwd.out.ptr) + p.fwd.out.offset(tile.sequence, row, head);
      for (int col = lane * kChunk; col < p.fwd.head_dim_v; col += 32 * kChunk) {
        *reinterpret_cast<uint4*>(out + col) = {0, 0, 0, 0};
      }
      if (lane == 0) {
        *p.fwd.lse.at(tile.sequence, row, head) = -INFINITY;
      }
    }
  }
}

}  // namespace flash::sm80
