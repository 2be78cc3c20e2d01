// How much scratch memory a call needs from its caller.
#pragma once

#include "core/varlen_rows.h"
#include "core/work_tile.h"
#include "launch/variant.h"

namespace flash {

// Entries of BwdWorkspace's arrays; 0: the pointer is null.
struct BwdWorkspaceSize {
  int64_t dq;
  int64_t stats;
  int64_t dq_semaphores;
  int64_t deltas_done;
  int64_t order;
  int64_t split_sums;  // of dk and dv together
};

// Rows of the workspace's sums of dK, or of dV: one for each key and GQA split, or those of each
// tile's row splits.
inline int64_t sum_rows(BwdParams const& p, Variant const& variant) {
  return p.gqa.splits > 1 ? num_keys(p.seqlens) * p.heads_kv * p.gqa.splits
                          : int64_t(p.row_split.slots()) * variant.block_n;
}

inline BwdWorkspaceSize workspace_size(BwdParams const& params, Variant const& variant,
                                       bool deterministic) {
  int64_t const blocks = params.heads_q * RowBlocks{variant.block_m}.count(params.seqlens);
  KvPersistent const& own = params.kv_persistent;
  int64_t const summed =
      own.used() ? int64_t(own.resident) * params.gqa.split_heads * own.row_blocks : blocks;
  // A single KV block has nothing to add to, and no other block to wait for.
  bool const sums = params.dq.ptr && params.seqlens.seqlen_k > variant.block_n;
  bool const ordered = sums && !own.used() && (deterministic || params.ordered_dq.used);
  return {sums ? summed * variant.block_m * variant.head_dim : 0,
          blocks * 2 * variant.block_m,
          ordered ? blocks : 0,
          params.ordered_dq.computes_delta ? int64_t(params.heads_q) * params.seqlens.batch + 1 : 0,
          own.used() && own.ordered ? VarlenRows::count(params.seqlens.batch) : 0,
          sum_rows(params, variant) *
              ((params.dk.ptr ? variant.head_dim : 0) + (params.dv.ptr ? variant.head_dim_v : 0))};
}

// memory: as many floats as workspace_size(...).split_sums.
inline void place_split_sums(BwdParams& p, Variant const& variant, float* memory) {
  Seqlens const& s = p.seqlens;
  int64_t const rows = sum_rows(p, variant);
  auto const place = [&](TensorView<void> const& gradient, int columns) -> TensorView<float> {
    if (rows == 0 || !gradient.ptr) {
      return {};
    }
    float* const begin = memory;
    memory += rows * columns;
    int64_t const key = p.gqa.splits > 1 ? int64_t(p.heads_kv) * p.gqa.splits * columns : columns;
    return {begin, s.cu_k ? 0 : s.seqlen_k * key, key, columns};
  };
  p.workspace.dk = place(p.dk, variant.head_dim);
  p.workspace.dv = place(p.dv, variant.head_dim_v);
}

}  // namespace flash
