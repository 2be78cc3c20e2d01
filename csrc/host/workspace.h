// How much scratch memory a call needs from its caller.
#pragma once

#include "core/packed_rows.h"
#include "core/row_blocks.h"
#include "host/variant.h"

namespace flash {

// Entries of BwdWorkspace's arrays; 0: the pointer is null.
struct BwdWorkspaceSize {
  int64_t dq;
  int64_t stats;
  int64_t turns;
  int64_t found;
  int64_t order;
  int64_t parts;  // of dk and dv together
};

// Rows that parts' sums of dK, or of dV, have in the workspace: of each key, or of each cut tile.
inline int64_t sum_rows(BwdParams const& p, Variant const& variant) {
  return p.group.parts > 1 ? num_keys(p.seqlens) * p.heads_kv * p.group.parts
                           : int64_t(p.cut.slots()) * variant.block_n;
}

inline BwdWorkspaceSize workspace_size(BwdParams const& params, Variant const& variant,
                                       bool deterministic) {
  int64_t const blocks = params.heads_q * RowBlocks{variant.block_m}.count(params.seqlens);
  KeyColumns const& columns = params.columns;
  int64_t const summed =
      columns.used() ? int64_t(columns.places) * params.group.part_heads * columns.row_blocks
                     : blocks;
  // One block of keys has nothing to add to and waits for no other block.
  bool const sums = params.dq.ptr && params.seqlens.seqlen_k > variant.block_n;
  bool const in_turns = sums && !columns.used() && (deterministic || params.relay.used);
  return {sums ? summed * variant.block_m * variant.head_dim : 0,
          blocks * 2 * variant.block_m,
          in_turns ? blocks : 0,
          params.relay.finds_delta ? int64_t(params.heads_q) * params.seqlens.batch + 1 : 0,
          columns.used() && columns.ordered ? PackedRows::count(params.seqlens.batch) : 0,
          sum_rows(params, variant) *
              ((params.dk.ptr ? variant.head_dim : 0) + (params.dv.ptr ? variant.head_dim_v : 0))};
}

// memory: as many numbers as workspace_size says.
inline void place_parts(BwdParams& p, Variant const& variant, float* memory) {
  Seqlens const& s = p.seqlens;
  int64_t const rows = sum_rows(p, variant);
  auto const place = [&](TensorView<void> const& gradient, int columns) -> TensorView<float> {
    if (rows == 0 || !gradient.ptr) {
      return {};
    }
    float* const begin = memory;
    memory += rows * columns;
    int64_t const key = p.group.parts > 1 ? int64_t(p.heads_kv) * p.group.parts * columns : columns;
    return {begin, s.cu_k ? 0 : s.seqlen_k * key, key, columns};
  };
  p.workspace.dk = place(p.dk, variant.head_dim);
  p.workspace.dv = place(p.dv, variant.head_dim_v);
}

}  // namespace flash
