// What a call brings to the cache, written by the thread blocks that read it: a launch less than
// with a kernel of its own. Each writes all that itself will read, so that none waits for another;
// those that read the same write the same. What nobody reads is the first piece's of each tile.
#pragma once

#include "sm80/append/row_copy.h"
#include "sm80/decode/packed_rows.h"

namespace flash::sm80 {

// The new rows of one thread block: queries of its tile, and keys and values [begin, end) of the
// new ones of its sequence and KV head.
template <class Config>
struct BlockRows {
  using Element = typename Config::Element;
  static constexpr int kColumns = 8;  // of a thread's step: 16 bytes
  static constexpr int kLanes = cute::max(Config::kHeadDim, Config::kHeadDimV) / kColumns;

  DecodeParams const& p;
  DecodeWork<Config> const& work;
  int before;  // keys there before
  int first;   // new key, among the keys of the sequence that are not padding
  int queries;
  int begin;
  int end;

  __device__ BlockRows(DecodeParams const& p_, DecodeWork<Config> const& work_)
      : p(p_), work(work_), before(p.fwd.seqlens.used_k[work.tile.sequence]) {
    Seqlens const& s = p.fwd.seqlens;
    first = min(max(before, -1), s.seqlen_k) - work.tile.info.leftpad;
    queries = p.rows.rotary.cos ? work.tile.rows : 0;
    bool const is_first = work.has_first_keys && work.tile.first_row == 0;
    begin = is_first ? 0 : max(work.begin - first, 0);
    end = is_first ? s.new_k : min(work.end - first, s.new_k);
  }

  // Whether there are new keys among the first `keys` of the block's.
  __device__ bool are_among(int keys) const {
    return first - work.begin < keys && work.begin - first < p.fwd.seqlens.new_k;
  }

  // By all threads. Code that runs once costs what it takes to fetch: hence no unrolling.
  __device__ void write() const {
    int const steps = (queries + 2 * max(end - begin, 0)) * kLanes;
#pragma unroll 1
    for (int step = threadIdx.x; step < steps; step += Config::kThreads) {
      RowCopy<Element> const copy = row(step / kLanes);
      int const col = step % kLanes * kColumns;
      if (copy.has(col)) {
        copy.store(col, copy.chunk(p.rows.rotary, col));
      }
    }
  }

 private:
  // Queries, then keys, then values.
  __device__ RowCopy<Element> row(int index) const {
    int const sequence = work.tile.sequence, key = index - queries, keys = end - begin;
    if (key < 0) {
      QueryRow const query = work.tile.row(p.group, index);
      return query_copy<Element>(p.rows, {sequence, query.query, query.head}, before,
                                 p.fwd.head_dim);
    }
    bool const is_key = key < keys;
    NewRow const at{sequence, begin + (is_key ? key : key - keys), work.tile.head_kv};
    return cache_copy<Element>(p.rows, is_key, work.pages, at, before, p.fwd.seqlens.seqlen_k);
  }
};

}  // namespace flash::sm80
