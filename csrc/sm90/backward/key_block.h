// The KV block that a CTA works on: the producer warp computes it, all other warps read it.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/row_range.h"
#include "sm90/backward/args.h"
#include "sm90/backward/config.h"
#include "sm90/pipeline.h"

namespace flash::sm90::backward {

// A tile, or a row split of one, as it was drawn.
struct RowSplitTile : WorkTile {
  int slot = -1;  // of a row split and its sums; -1: the tile is whole
};

template <class Config>
using KeyTile = std::conditional_t<Config::kRowSplit, RowSplitTile, WorkTile>;

// Where a tile's sums of dK and dV are in the workspace: the row of its first key, and rows from
// one key to the next. step 0: the tile is whole and has no sums.
struct SumRows {
  int64_t first;
  int step;
};

// Kernels without row splits find the sums by the tile's head.
struct NoSumRows {};

// Everything about a KV block that stays the same over its iterations.
template <class Config>
struct KeyBlock {
  WorkTile tile;    // m_block: the KV block; head: the GQA split. Not valid: there are no more
  uint32_t number;  // KV blocks that this CTA had before
  SequenceMask mask;
  RowRange range;  // row blocks that see the keys
  int shift;       // seqlen_k - seqlen_q
  int seqlen_q;
  int key_begin;
  int slots;            // keys that exist and so have gradients; KV-persistent: also those after
  float dq_scale;       // of the dQ that this KV block stores
  int heads;            // query heads of the tile
  int head_begin;       // the first of them
  int64_t row_q;        // first row of the sequence
  int64_t row_k;        // first key of this block
  int64_t blocks;       // row blocks of all sequences
  int64_t block_begin;  // the sequence's first row block
  TileCoord q_at;       // all rows of the sequence, of head_begin
  TileCoord keys_at;    // the keys of this block
  [[no_unique_address]] std::conditional_t<Config::kRowSplit, SumRows, NoSumRows> sums;
  // Dropout of head_begin, so that drawing bits in an iteration does not wait for global memory.
  struct NoDropout {};
  [[no_unique_address]] std::conditional_t<Config::kHalfFactors, DropoutMask, NoDropout> dropout;

  __device__ KeyBlock(BackwardArgs const& args, KeyTile<Config> const& tile_, uint32_t number_)
      : KeyBlock(args.params, tile_, number_, BlockInfo(args.params.seqlens, tile_.batch)) {}

  // Numbers the row blocks of all heads, as the workspaces do.
  __device__ int64_t row_block(int head, int m_block) const {
    return (head_begin + head) * blocks + block_begin + m_block;
  }
  __device__ int m_block_of(int64_t row_block) const {
    return static_cast<int>(row_block % blocks - block_begin);
  }
  __device__ int head_of(int64_t row_block) const {  // among all query heads
    return static_cast<int>(row_block / blocks);
  }

  // Calls iteration(head, m_block) for the row blocks of all query heads of the GQA split, head by
  // head.
  template <class Iteration>
  __device__ __forceinline__ void for_each_iteration(Iteration iteration) const {
    int const count = range.count();
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int step = 0; step < count; ++step) {
        iteration(head, range.from_last(step));
      }
    }
  }

  // Whether dK and dV go to sums, if the call has sums.
  __device__ bool has_sums() const {
    if constexpr (Config::kRowSplit) {
      return sums.step > 0;
    } else {
      return true;
    }
  }

  // Offset in `to` of the block's key `first`.
  __device__ int64_t sum_offset(TensorView<float> const& to, int first) const {
    if constexpr (Config::kRowSplit) {
      return (sums.first + first * sums.step) * to.head_stride;
    } else {
      return to.offset(tile.batch, row_k + first, tile.head);
    }
  }

  // Distance in `to` from one key to the next.
  __device__ int64_t sum_stride(TensorView<float> const& to) const {
    if constexpr (Config::kRowSplit) {
      return sums.step * to.head_stride;
    } else {
      return to.row_stride;
    }
  }

  __device__ TileCoord rows_at(int head, int m_block) const {
    int const row = m_block * Config::kBlockM;
    return {q_at.row + row, min(seqlen_q - row, Config::kBlockM), q_at.head + head, q_at.batch};
  }

 private:
  // Whether lengths are as the caller said. If there are more keys, other KV blocks store to the
  // same rows, too; if there are more rows, they have no sums of their own in a KV-persistent call.
  // A call with ordered dQ is dense.
  __device__ static bool has_all_of_dq(BwdParams const& p, BlockInfo const& info) {
    if constexpr (Config::kOrderedDq) {
      return true;
    }
    if constexpr (Config::kKvPersistent) {
      if (p.workspace.dq) {
        return info.seqlen_q <= p.kv_persistent.row_blocks * Config::kBlockM;
      }
    }
    return info.seqlen_k <= Config::kBlockN;
  }

  // The row blocks of a row split. Iterations go from the last row block to the first, and so do
  // the splits.
  __device__ static RowRange rows_of_split(RowSplit const& rows, int slot, RowRange range) {
    int const split = rows.split_of(slot), count = range.count();
    int const end = range.end;
    range.end = end - rows.iterations_before(split, count);
    range.begin = end - rows.iterations_before(split + 1, count);
    return range;
  }

  __device__ SumRows sum_rows(BwdParams const& p, int slot) const {
    if (slot >= 0) {
      return {int64_t(slot) * Config::kBlockN, 1};
    }
    if (p.gqa.splits == 1) {
      return {0, 0};
    }
    int const heads = p.heads_kv * p.gqa.splits;
    int64_t const key = row_k + (p.seqlens.cu_k ? 0 : int64_t(tile.batch) * p.seqlens.seqlen_k);
    return {key * heads + tile.head, heads};
  }

  __device__ KeyBlock(BwdParams const& p, KeyTile<Config> const& tile_, uint32_t number_,
                      BlockInfo const& info)
      : tile(tile_),
        number(number_),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        shift(info.seqlen_k - info.seqlen_q),
        seqlen_q(info.seqlen_q),
        key_begin(tile_.m_block * Config::kBlockN),
        slots(Config::kKvPersistent ? info.slots_k - key_begin
                                    : min(info.slots_k - key_begin, Config::kBlockN)),
        dq_scale(has_all_of_dq(p, info) ? p.scores.softmax_scale / (1.f - p.scores.dropout_p)
                                        : NAN),
        row_q(info.row_q),
        row_k(info.row_k + key_begin) {
    range = row_range(mask, info.seqlen_q, key_begin, Config::kBlockN, Config::kBlockM);
    if constexpr (Config::kRowSplit) {
      if (tile_.slot >= 0) {
        range = rows_of_split(p.row_split, tile_.slot, range);
      }
      sums = sum_rows(p, tile_.slot);
    }
    RowBlocks const row_blocks{Config::kBlockM};
    blocks = row_blocks.count(p.seqlens);
    block_begin = row_blocks.first(p.seqlens, tile.batch, info.row_q);
    HeadsOfTile const own = p.gqa.heads_of(tile.head);
    heads = own.heads;
    if constexpr (Config::kHalfFactors) {
      if (p.scores.dropout_p > 0.f && tile.batch < p.seqlens.batch) {
        dropout = DropoutMask(p.scores, tile.batch, p.heads_q, own.head_begin);
      }
    }
    head_begin = own.head_begin;
    // A varlen tensor is one batch entry.
    q_at = {static_cast<int>(row_q), info.seqlen_q, head_begin, p.seqlens.cu_q ? 0 : tile.batch};
    int const keys = max(min(info.seqlen_k - key_begin, Config::kBlockN), 0);
    keys_at = {static_cast<int>(row_k), keys, own.head_kv, p.seqlens.cu_k ? 0 : tile.batch};
  }
};

// One iteration: a row block of one of a tile's heads.
struct RowIteration {
  int64_t row_block;  // its number in the workspaces
  int head;           // among the tile's
  int m_block;
  bool masked;    // a mask limit cuts through
  bool more;      // another iteration of the tile follows
  bool followed;  // none follows, but a next tile, whose first scores start here
};

// LSE and D of a row block's rows, which are columns here, as in the workspace.
template <int kBlockM>
struct RowStats {
  float lse_log2[kBlockM];
  float softmax_d[kBlockM];
};

}  // namespace flash::sm90::backward
