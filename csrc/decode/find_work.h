// Which keys of which tile a CTA works on.
#pragma once

#include "core/warp_lanes.h"
#include "decode/tile_rows.h"

namespace flash::decode {

// The size by which the batch is cut; 0 for sequences that the forward kernel computes. Row blocks
// of a dense call count as tiles instead (launch/decode_schedule.cpp).
template <class Config>
__device__ SequenceSize sequence_size(DecodeParams const& p, int sequence) {
  FwdParams const& fwd = p.fwd;
  BlockInfo const info(fwd.seqlens, sequence);
  SequenceMask const mask(fwd.mask, info.seqlen_q, info.seqlen_k);
  int const units = num_units<Config>(visible_keys<Config>(mask, info.seqlen_q));
  if (!fwd.seqlens.cu_q) {
    return {units, 1};
  }
  bool const few = info.seqlen_q <= fwd.seqlens.few_q && sequence < fwd.seqlens.batch;
  if (!few && fwd.seqlens.few_q != kAllQueries) {
    return {0, 0};
  }
  int64_t const rows = int64_t(info.seqlen_q) * p.group.divisor;
  return {units, int((rows + Config::kBlockM - 1) / Config::kBlockM)};
}

// Called by one whole warp.
template <class Config>
__device__ void find_work(DecodeParams const& p, PieceShare const& share,
                          DecodeWork<Config>& work) {
  auto const size = [&](int sequence) { return sequence_size<Config>(p, sequence); };
  Piece const piece = find_piece(p.schedule, share.piece(), WarpLanes{}, size);
  if (threadIdx.x != 0) {
    return;
  }
  work.piece = piece;
  if (!piece.valid) {
    return;
  }
  DecodeTile<Config> const tile(p, piece.sequence, piece.tile);
  KeyLimits const visible = visible_keys<Config>(tile.mask, tile.info.seqlen_q);
  UnitRange const range =
      even_share(piece.range(num_units<Config>(visible)), share.rank(), share.blocks());
  work.tile = tile;
  work.has_first_keys = piece.number == 0 && share.rank() == 0;
  work.begin = visible.begin + range.begin * Config::kUnit;
  work.end = min(visible.begin + range.end * Config::kUnit, visible.end);
  work.pages = KeyPages(p.fwd.pages, tile.info, tile.sequence);
  using Cached = typename Config::Cached;
  work.k = static_cast<Cached const*>(p.fwd.k.ptr) + tile.head_kv * p.fwd.k.head_stride;
  work.v = static_cast<Cached const*>(p.fwd.v.ptr) + tile.head_kv * p.fwd.v.head_stride;
}

}  // namespace flash::decode
