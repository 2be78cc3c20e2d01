// The pass before attention against a cache: it rotates new keys by their positions and writes them
// into the cache, writes new values there, too, and rotates queries on their way to a workspace.
// One warp a row, 16 bytes a lane.
#pragma once

#include "params/scores.h"
#include "passes/append/row_copy.h"

namespace flash::append {

template <class Element_, int kRows_, ScoreLevel>
struct AppendConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;  // of a CTA, one warp each
  static constexpr int kThreads = kRows * 32;
  static constexpr int kChunk = 8;  // elements of a lane: 16 bytes
};

template <class Config>
constexpr int kSmemBytes = 0;

// Rows are numbered (sequence, row, head), heads first.
__device__ inline NewRow new_row(int64_t index, FastDiv const& rows, FastDiv const& heads) {
  int const i = static_cast<int>(index);
  int const sequence_and_row = heads.quotient(i);
  int const sequence = rows.quotient(sequence_and_row);
  return {sequence, rows.remainder(sequence_and_row, sequence),
          heads.remainder(i, sequence_and_row)};
}

// The index-th row of the three kinds: queries, keys, values.
template <class Element>
__device__ RowCopy<Element> copy_of(AppendParams const& p, int64_t index) {
  Seqlens const& s = p.seqlens;
  if (index < p.queries) {
    NewRow const at = new_row(index, p.seqlen_q, p.heads_q);
    return query_copy<Element>(p.rows, at, s.used_k[at.sequence], p.head_dim);
  }
  int64_t const key = index - p.queries;
  bool const is_key = key < p.keys;
  if (!is_key && key >= 2 * p.keys) {
    return {};
  }
  NewRow const at = new_row(is_key ? key : key - p.keys, p.new_k, p.heads_kv);
  KeyPages const pages(p.pages, BlockInfo(s, at.sequence), at.sequence);
  return cache_copy<Element>(p.rows, is_key, pages, at, s.used_k[at.sequence], s.seqlen_k);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    append_kernel(__grid_constant__ AppendParams const p) {
  using Element = typename Config::Element;
  int64_t const row = int64_t(blockIdx.x) * Config::kRows + threadIdx.x / 32;
  RowCopy<Element> const copy = copy_of<Element>(p, row);
#pragma unroll 1
  for (int col = threadIdx.x % 32 * Config::kChunk; copy.has(col); col += 32 * Config::kChunk) {
    copy.store(col, copy.chunk(p.rows.rotary, col));
  }
}

}  // namespace flash::append
