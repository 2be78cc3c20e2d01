// The row block that a CTA works on: the scheduler warp computes it, all other warps read it.
#pragma once

#include "core/block_range.h"
#include "core/dropout.h"
#include "core/score_mod.h"
#include "sm90/forward/args.h"
#include "sm90/forward/config.h"
#include "sm90/pipeline.h"

namespace flash::sm90::forward {

// Everything about a row block that stays the same over its steps.
template <class Config>
struct RowBlock {
  using Element = typename Config::Element;

  WorkTile tile;    // not valid: there are no more
  uint32_t number;  // row blocks that this CTA had before
  SequenceMask mask;
  BlockRange range;
  int masked_steps;  // the first steps of the range
  int row_begin;     // of the queries
  int rows;          // queries that exist, of those that the block has room for
  ScoreMod score_mod;
  DropoutMask dropout;
  bool drops;
  float value_scale;          // of V's codes; unset where V has 16 bits
  float const* sinks;         // logits from the first head on; null: none
  typename Config::Out* out;  // first row of this block
  float* lse;
  // For the producer warps
  TileCoord q_at;     // all queries; with pack-GQA, `head` is the KV head
  TileCoord keys_at;  // all keys of the sequence, in K and in V; in pages, only head and rows count

  __device__ RowBlock(ForwardArgs const& args, WorkTile const& tile_, uint32_t number_)
      : RowBlock(args, tile_, number_, BlockInfo(args.params.seqlens, tile_.batch)) {}

 private:
  __device__ RowBlock(ForwardArgs const& args, WorkTile const& tile_, uint32_t number_,
                      BlockInfo const& info)
      : tile(tile_),
        number(number_),
        mask(args.params.mask, info.seqlen_q, info.seqlen_k),
        row_begin(tile_.m_block * Config::kConsumers * args.rows.template queries_of<Config>()),
        rows(min(info.seqlen_q - row_begin,
                 Config::kConsumers * args.rows.template queries_of<Config>())) {
    FwdParams const& p = args.params;
    int const group = p.heads_q / p.heads_kv;
    FastDiv const& splits = p.splits.count;
    int const tile_head = Config::kSplit ? splits.quotient(tile.head) : tile.head;
    int const split = Config::kSplit ? splits.remainder(tile.head, tile_head) : 0;
    int const head = Config::kPackGqa ? tile_head * group : tile_head;
    range = block_range(mask, row_begin, row_begin + rows, Config::kBlockN);
    int64_t const row = info.row_q + row_begin;
    if constexpr (Config::kSplit) {
      range = range.split(split, splits);
      out = p.splits.out.ptr + split * p.splits.out_apart +
            p.splits.out.offset(tile.batch, row, head);
      lse = p.splits.lse.at(tile.batch, row, head) + split * p.splits.lse_apart;
    } else {
      out = static_cast<Element*>(p.out.ptr) + p.out.offset(tile.batch, row, head);
      lse = p.lse.at(tile.batch, row, head);
    }
    masked_steps = range.masked_count();
    // The rows after the last sequence (see BlockInfo) have neither slopes nor sinks.
    bool const is_sequence = tile.batch < p.seqlens.batch;
    float const slope = is_sequence ? p.scores.alibi_slope(tile.batch, head) : 0.f;
    float softmax_scale = p.scores.softmax_scale;
    if constexpr (Config::kCodes) {
      // The descales of a sequence without keys may be anything, NaN too.
      bool const has_keys = is_sequence && info.seqlen_k > 0;
      softmax_scale *= has_keys ? p.codes.k.of_head(tile.batch, head / group) : 1.f;
      if constexpr (Config::kFp8) {
        softmax_scale *= has_keys ? p.codes.q.of_head(tile.batch, head / group) : 1.f;
      }
      if constexpr (Config::kScores == ScoreLevel::Plain) {
        // If tiny descales made the scale 0, a row would look as if it saw no key.
        constexpr float kLeast = 1e-30f;
        softmax_scale = softmax_scale < kLeast ? kLeast : softmax_scale;
      }
      value_scale = has_keys ? p.codes.v.of_head(tile.batch, head / group) : 1.f;
    }
    score_mod = {softmax_scale, p.scores.softcap, slope, info.seqlen_k - info.seqlen_q};
    drops = p.scores.dropout_p > 0.f;
    if (drops && is_sequence) {
      dropout = DropoutMask(p.scores, tile.batch, p.heads_q, head);
    }
    // A row's sink belongs to one of its KV splits.
    sinks = p.scores.s_aux && is_sequence && split == 0 ? p.scores.s_aux + head : nullptr;

    // A varlen tensor is one batch entry.
    q_at = {static_cast<int>(row), rows, tile_head, p.seqlens.cu_q ? 0 : tile.batch};
    keys_at = {static_cast<int>(info.row_k), info.seqlen_k, head / group,
               p.seqlens.cu_k ? 0 : info.batch_k};
  }
};

}  // namespace flash::sm90::forward
