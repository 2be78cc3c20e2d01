// The KV block that a CTA works on, and its shared memory.
#pragma once

#include "core/row_range.h"
#include "core/work_tile.h"
#include "params/bwd_params.h"
#include "sm80/backward/config.h"

namespace flash::sm80 {

// One iteration: a row block that sees the KV block.
struct RowIteration {
  int head;     // query head among the tile's: 0, 1, …
  int m_block;  // row block of the sequence
};

// Everything about a KV block that stays the same over its iterations.
template <class Config>
struct KeyBlock {
  using Element = typename Config::Element;

  WorkTile tile;  // m_block: the KV block; head: the GQA split
  BlockInfo info;
  SequenceMask mask;
  RowRange range;
  int key_begin;
  int keys;             // of the kBlockN that may be attended to
  int slots;            // of the kBlockN that exist: the others have no gradient to store
  float dq_scale;       // of the dQ that this KV block stores
  int heads;            // query heads of the tile
  int head_begin;       // the first of them
  int64_t blocks;       // row blocks of all sequences
  int64_t block_begin;  // the sequence's first row block
  Element const* q;     // first row of the sequence, head_begin
  Element const* dout;
  Element const* k;  // first key of this block
  Element const* v;

  __device__ KeyBlock(BwdParams const& p, WorkTile const& tile_)
      : KeyBlock(p, tile_, p.gqa.heads_of(tile_.head)) {}

  // Index of a row block in the workspaces.
  __device__ int64_t index(RowIteration at) const {
    return (head_begin + at.head) * blocks + block_begin + at.m_block;
  }

 private:
  __device__ KeyBlock(BwdParams const& p, WorkTile const& tile_, HeadsOfTile const& own)
      : tile(tile_),
        info(p.seqlens, tile_.batch),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        key_begin(tile_.m_block * Config::kBlockN),
        keys(min(info.seqlen_k - key_begin, Config::kBlockN)),
        slots(min(info.slots_k - key_begin, Config::kBlockN)),
        // If there are more keys than the caller said, other KV blocks store to the same rows, too.
        dq_scale(info.seqlen_k <= Config::kBlockN
                     ? p.scores.softmax_scale / (1.f - p.scores.dropout_p)
                     : NAN),
        heads(own.heads),
        head_begin(own.head_begin) {
    range = row_range(mask, info.seqlen_q, key_begin, Config::kBlockN, Config::kBlockM);
    RowBlocks const row_blocks{Config::kBlockM};
    blocks = row_blocks.count(p.seqlens);
    block_begin = row_blocks.first(p.seqlens, tile.batch, info.row_q);
    int const batch = tile.batch;
    int64_t const key = info.row_k + key_begin;
    q = static_cast<Element const*>(p.q.ptr) + p.q.offset(batch, info.row_q, head_begin);
    dout = static_cast<Element const*>(p.dout.ptr) + p.dout.offset(batch, info.row_q, head_begin);
    k = static_cast<Element const*>(p.k.ptr) + p.k.offset(batch, key, own.head_kv);
    v = static_cast<Element const*>(p.v.ptr) + p.v.offset(batch, key, own.head_kv);
  }
};

// LSE and D of a row block's rows, which are columns here.
template <int kBlockM>
struct RowStats {
  float lse_log2[kBlockM];
  float softmax_d[kBlockM];
};

template <class Config>
struct SharedStorage : DepthSums<Config, 2 * Config::kScoreNumbers> {  // of S and of dP
  using Element = typename Config::Element;
  // SmemTile<kRows, kColumns>
  template <int kRows, int kColumns>
  using Tile = array_aligned<Element, kRows * kColumns, 128>;
  static constexpr int kM = Config::kBlockM, kN = Config::kBlockN;

  Tile<kN, Config::kHeadDim> k;   // dK takes its place after the last product
  Tile<kN, Config::kHeadDimV> v;  // dV
  Tile<kM, Config::kHeadDim> q[Config::kStages];
  Tile<kM, Config::kHeadDimV> dout[Config::kStages];
  Tile<kN, kM> ds;
  alignas(128) Element p[Config::kExchangeP ? kN * kM : 1];
  alignas(16) RowStats<Config::kBlockM> stats[Config::kStages];
  // In shared memory and read again at each use, to save registers.
  alignas(16) char block[sizeof(KeyBlock<Config>)];
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

}  // namespace flash::sm80
