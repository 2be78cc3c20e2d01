// The row block that a CTA works on, and its shared memory.
#pragma once

#include "core/block_range.h"
#include "core/paging.h"
#include "core/score_mod.h"
#include "core/work_tile.h"
#include "params/fwd_params.h"
#include "sm80/forward/config.h"

namespace flash::sm80 {

// Everything about a row block that stays the same over its steps.
template <class Config>
struct RowBlock {
  using Element = typename Config::Element;

  WorkTile tile;
  BlockInfo info;
  SequenceMask mask;
  BlockRange range;
  int row_begin;
  int rows;  // of the kBlockM that exist
  ScoreMod score_mod;
  float sink;        // logit; -inf: none
  Element const* q;  // first row of this block
  Element const* k;  // first key of the sequence; in pages: of the tensor
  Element const* v;
  Element* out;  // first row of this block
  float* lse;
  MaxLogits max_logits;   // of_heads: of this head
  bool keeps_max_logits;  // whether the call asks, in one word
  KeyPages pages;
  bool pages_missing;

  __device__ RowBlock(FwdParams const& p, WorkTile const& tile_)
      : tile(tile_),
        info(p.seqlens, tile_.batch),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        row_begin(tile_.m_block * Config::kBlockM),
        rows(min(info.seqlen_q - row_begin, Config::kBlockM)),
        pages(p.pages, info, tile_.batch),
        pages_missing(false) {
    range = block_range(mask, row_begin, row_begin + rows, Config::kBlockN);
    int const batch = tile.batch, head = tile.head;
    int const head_kv = head / (p.heads_q / p.heads_kv);
    int64_t const row = info.row_q + row_begin;
    q = static_cast<Element const*>(p.q.ptr) + p.q.offset(batch, row, head);
    int const batch_k = Config::kPaged ? 0 : info.batch_k;
    int64_t const row_k = Config::kPaged ? 0 : info.row_k;
    k = static_cast<Element const*>(p.k.ptr) + p.k.offset(batch_k, row_k, head_kv);
    v = static_cast<Element const*>(p.v.ptr) + p.v.offset(batch_k, row_k, head_kv);
    out = static_cast<Element*>(p.out.ptr) + p.out.offset(batch, row, head);
    lse = p.lse.at(batch, row, head);
    max_logits = p.max_logits;
    max_logits.of_heads += max_logits.of_heads ? head : 0;
    keeps_max_logits = p.max_logits.wanted();
    // The rows after the last sequence (see BlockInfo) have neither slopes nor sinks.
    bool const is_sequence = batch < p.seqlens.batch;
    float const slope = is_sequence ? p.scores.alibi_slope(batch, head) : 0.f;
    score_mod = {p.scores.softmax_scale, p.scores.softcap, slope, info.seqlen_k - info.seqlen_q};
    sink = p.scores.s_aux && is_sequence ? p.scores.s_aux[head] : -INFINITY;
  }
};

// Tiles [rows, columns] in the layout of SmemTile.
template <class Config>
struct SharedStorage : DepthSums<Config, Config::kScoreNumbers> {
  template <int kRows, int kColumns>
  using Tile = array_aligned<typename Config::Element, kRows * kColumns, 128>;
  union {
    // O takes Q's place: the barrier that V of the last KV block waits at lies between the last
    // product with Q and the first store of O.
    Tile<Config::kBlockM, Config::kHeadDim> q;
    Tile<Config::kBlockM, Config::kHeadDimV> out;
  };
  Tile<Config::kBlockN, Config::kHeadDim> k;
  Tile<Config::kBlockN, Config::kHeadDimV> v;
  // In shared memory and read again at each use: kept in registers, these two dozen words make the
  // kernel spill.
  alignas(16) char block[sizeof(RowBlock<Config>)];
  // Each row's largest logit; see KeepMaxLogits.
  int maxima[Config::kScores == ScoreLevel::Plain ? 1 : Config::kBlockM];
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

}  // namespace flash::sm80
