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
  int64_t order;
  int64_t parts;  // of dk and dv together
};

// Numbers of one key's dK or dV in the workspace, if it is there in parts: of all columns that the
// kernel computes.
inline int64_t part_row(BwdParams const& p, TensorView<void> const& gradient, int columns) {
  bool const in_parts = p.group.parts > 1 && gradient.ptr;
  return in_parts ? int64_t(p.heads_kv) * p.group.parts * columns : 0;
}

inline BwdWorkspaceSize workspace_size(BwdParams const& params, Variant const& variant,
                                       bool deterministic) {
  int64_t const blocks = params.heads_q * RowBlocks{variant.block_m}.count(params.seqlens);
  KeyColumns const& columns = params.columns;
  int64_t const summed =
      columns.used() ? int64_t(columns.places) * params.group.part_heads * columns.row_blocks
                     : blocks;
  // One block of keys has nothing to add to, and nobody to wait for.
  bool const sums = params.dq.ptr && params.seqlens.seqlen_k > variant.block_n;
  return {sums ? summed * variant.block_m * variant.head_dim : 0, blocks * 2 * variant.block_m,
          sums && deterministic && !columns.used() ? blocks : 0,
          columns.used() && columns.ordered ? PackedRows::count(params.seqlens.batch) : 0,
          num_keys(params.seqlens) * (part_row(params, params.dk, variant.head_dim) +
                                      part_row(params, params.dv, variant.head_dim_v))};
}

// memory: as many numbers as workspace_size says.
inline void place_parts(BwdParams& p, Variant const& variant, float* memory) {
  Seqlens const& s = p.seqlens;
  auto const place = [&](TensorView<void> const& gradient, int columns) -> TensorView<float> {
    int64_t const row = part_row(p, gradient, columns);
    if (row == 0) {
      return {};
    }
    float* const begin = memory;
    memory += num_keys(s) * row;
    return {begin, s.cu_k ? 0 : s.seqlen_k * row, row, columns};
  };
  p.workspace.dk = place(p.dk, variant.head_dim);
  p.workspace.dv = place(p.dv, variant.head_dim_v);
}

}  // namespace flash
