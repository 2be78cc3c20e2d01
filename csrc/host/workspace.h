// How much scratch memory a call needs from its caller.
#pragma once

#include "core/row_blocks.h"
#include "host/variant.h"

namespace flash {

// Entries of BwdWorkspace's arrays; 0: the pointer is null.
struct BwdWorkspaceSize {
  int64_t dq;
  int64_t stats;
  int64_t turns;
};

inline BwdWorkspaceSize workspace_size(BwdParams const& params, Variant const& variant,
                                       bool deterministic) {
  int64_t const blocks = params.heads_q * RowBlocks{variant.block_m}.count(params.seqlens);
  // One block of keys has nothing to add to, and nobody to wait for.
  bool const sums = params.dq.ptr && params.seqlens.seqlen_k > variant.block_n;
  return {sums ? blocks * variant.block_m * variant.head_dim : 0, blocks * 2 * variant.block_m,
          sums && deterministic ? blocks : 0};
}

}  // namespace flash
