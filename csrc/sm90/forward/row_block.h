// What one thread block works on, as the loader finds it out and everybody else reads it.
#pragma once

#include "core/block_info.h"
#include "core/block_range.h"
#include "core/mask.h"
#include "core/score_mod.h"
#include "core/work_tile.h"
#include "params/fwd_params.h"
#include "sm90/forward/config.h"
#include "sm90/tma.h"

namespace flash::sm90 {

// Everything about one row block that stays the same while its keys go by.
template <class Config>
struct RowBlock {
  using Element = typename Config::Element;

  WorkTile tile;  // not valid: there are no more
  SequenceMask mask;
  BlockRange range;
  int row_begin;
  int rows;  // of the kBlockM that exist
  ScoreMod score_mod;
  float sink;    // logit; -inf: none
  Element* out;  // first row of this block
  float* lse;
  // For the loader
  TileCoord q_at;
  TileCoord keys_at;  // of the first key of the sequence, in K and in V
  // Keys of the last block that the sequence has, if memory behind them holds other numbers; else
  // 0. Masked scores make their probabilities 0, but 0 * NaN is NaN, so those rows of V have to go.
  int keys_in_last;

  __device__ RowBlock(FwdParams const& p, WorkTile const& tile_)
      : RowBlock(p, tile_, BlockInfo(p.seqlens, tile_.batch)) {}

 private:
  __device__ RowBlock(FwdParams const& p, WorkTile const& tile_, BlockInfo const& info)
      : tile(tile_),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        row_begin(tile_.m_block * Config::kBlockM),
        rows(min(info.seqlen_q - row_begin, Config::kBlockM)) {
    range = block_range(mask, row_begin, row_begin + rows, Config::kBlockN);
    int64_t const row = info.row_q + row_begin;
    out = static_cast<Element*>(p.out.ptr) + p.out.offset(tile.batch, row, tile.head);
    lse = p.lse.at(tile.batch, row, tile.head);
    // The rows behind the last sequence (see BlockInfo) have neither slopes nor sinks.
    bool const is_sequence = tile.batch < p.seqlens.batch;
    float const slope =
        p.scores.alibi_slopes && is_sequence
            ? p.scores.alibi_slopes[tile.batch * p.scores.alibi_batch_stride + tile.head]
            : 0.f;
    score_mod = {p.scores.softmax_scale, p.scores.softcap, slope, info.seqlen_k - info.seqlen_q};
    sink = p.scores.s_aux && is_sequence ? p.scores.s_aux[tile.head] : -INFINITY;

    // A packed tensor is one batch entry.
    q_at = {static_cast<int>(row), tile.head, p.seqlens.cu_q ? 0 : tile.batch};
    keys_at = {static_cast<int>(info.row_k), tile.head / (p.heads_q / p.heads_kv),
               p.seqlens.cu_k ? 0 : info.batch_k};
    int64_t const rows_k = p.seqlens.cu_k ? p.seqlens.total_k : p.seqlens.seqlen_k;
    int const in_last = info.seqlen_k - (range.end - 1) * Config::kBlockN;
    bool const ends_inside =
        in_last < Config::kBlockN && info.row_k + info.seqlen_k < rows_k && range.count() > 0;
    keys_in_last = ends_inside ? in_last : 0;
  }
};

}  // namespace flash::sm90
