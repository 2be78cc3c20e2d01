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

// What the loader needs to know of a row block, few words because it has few registers.
struct LoadPlan {
  BlockRange range;
  TileCoord q;
  TileCoord k;  // of the first key of the sequence; V's are the same
  // Keys of the last block that the sequence has, if memory behind them holds other numbers; else
  // 0. Masked scores make their probabilities 0, but 0 * NaN is NaN, so those rows of V have to go.
  int keys_in_last;

  __device__ LoadPlan(FwdParams const& p, WorkTile const& tile, BlockInfo const& info, int block_m,
                      int block_n) {
    int const row_begin = tile.m_block * block_m;
    range = block_range({p.mask, info.seqlen_q, info.seqlen_k}, row_begin,
                        min(info.seqlen_q, row_begin + block_m), block_n);
    // A packed tensor is one batch entry.
    q = {static_cast<int>(info.row_q) + row_begin, tile.head, p.seqlens.cu_q ? 0 : tile.batch};
    k = {static_cast<int>(info.row_k), tile.head / (p.heads_q / p.heads_kv),
         p.seqlens.cu_k ? 0 : info.batch_k};
    int64_t const rows_k = p.seqlens.cu_k ? p.seqlens.total_k : p.seqlens.seqlen_k;
    int const in_last = info.seqlen_k - (range.end - 1) * block_n;
    bool const ends_inside = in_last < block_n && info.row_k + info.seqlen_k < rows_k;
    keys_in_last = ends_inside ? in_last : 0;
  }
};

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

  __device__ RowBlock(FwdParams const& p, WorkTile const& tile_, BlockInfo const& info,
                      BlockRange const& range_)
      : tile(tile_),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        range(range_),
        row_begin(tile_.m_block * Config::kBlockM),
        rows(min(info.seqlen_q - row_begin, Config::kBlockM)) {
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
  }
};

}  // namespace flash::sm90
