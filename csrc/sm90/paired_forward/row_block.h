// The rows of a CTA of a pair, and the KV blocks that the pair goes through.
#pragma once

#include "core/block_range.h"
#include "core/paging.h"
#include "core/tile_grid.h"
#include "params/fwd_params.h"
#include "sm90/tensor_map.h"

namespace flash::sm90::forward {

// What a launch passes to the kernel.
struct PairedForwardArgs {
  TensorMap k;  // boxes of box_keys keys and 64 columns
  TensorMap v;
  int box_keys;  // kBlockN; with pages, a power of two that divides it and a page
  // Runs of 64 columns that are loaded: boxes outside of the tensor take longer than others. V's
  // missing columns are never stored. K's are zeros, which no load of V overwrites.
  int k_runs;
  int v_runs;
  FwdParams params;
  TileGrid grid;  // of the pairs' row blocks
};

template <class Config>
struct PairedRowBlock {
  using Element = typename Config::Element;

  WorkTile tile;  // the pair's
  SequenceMask mask;
  BlockRange range;  // of the pair's rows: both CTAs load all of its blocks
  int row_begin;     // of this CTA's rows, in the sequence
  int rows;          // that exist
  float sink;        // logit; -inf: none
  Element const* q;  // first row of this CTA
  Element* out;
  float* lse;
  TileCoord keys_at;  // all keys of the sequence, in K and in V; in pages, only head and rows count
  KeyPages pages;

  __device__ PairedRowBlock(FwdParams const& p, WorkTile const& tile_, int rank)
      : PairedRowBlock(p, tile_, rank, BlockInfo(p.seqlens, tile_.batch)) {}

  __device__ TileCoord keys(int block) const {
    int const first = block * Config::kBlockN;
    return {keys_at.row + first, min(keys_at.rows - first, Config::kBlockN), keys_at.head,
            keys_at.batch};
  }

 private:
  __device__ PairedRowBlock(FwdParams const& p, WorkTile const& tile_, int rank,
                            BlockInfo const& info)
      : tile(tile_), mask(p.mask, info.seqlen_q, info.seqlen_k), pages(p.pages, info, tile_.batch) {
    int const begin = tile.m_block * Config::kBlockM, head = tile.head;
    int const of_pair = min(info.seqlen_q - begin, Config::kBlockM);
    range = block_range(mask, begin, begin + of_pair, Config::kBlockN);
    row_begin = begin + rank * Config::kRows;
    rows = max(min(of_pair - rank * Config::kRows, Config::kRows), 0);
    int64_t const row = info.row_q + row_begin;
    q = static_cast<Element const*>(p.q.ptr) + p.q.offset(tile.batch, row, head);
    out = static_cast<Element*>(p.out.ptr) + p.out.offset(tile.batch, row, head);
    lse = p.lse.at(tile.batch, row, head);
    // The rows after the last sequence (see BlockInfo) have no sinks.
    bool const is_sequence = tile.batch < p.seqlens.batch;
    sink = p.scores.s_aux && is_sequence ? p.scores.s_aux[head] : -INFINITY;
    // A varlen tensor is one batch entry.
    keys_at = {static_cast<int>(info.row_k), info.seqlen_k, head / (p.heads_q / p.heads_kv),
               p.seqlens.cu_k ? 0 : info.batch_k};
  }
};

}  // namespace flash::sm90::forward
