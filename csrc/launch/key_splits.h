// The workspace for the results of a forward's KV splits, and which kernel merges them.
#pragma once

#include "launch/variant.h"

namespace flash {

// Rows of all heads; each has a result of each split.
inline int64_t rows_of_splits(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return p.heads_q * (s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q);
}

inline bool merges_at_once(FwdParams const& p) {
  return merges_at_once(rows_of_splits(p), p.splits.count.divisor);
}

// Floats that the splits' results take.
int64_t key_splits_workspace(FwdParams const& params, int splits);

// The value of params.splits, with the results in that workspace.
KeySplits place_key_splits(FwdParams const& params, int splits, float* workspace);

}  // namespace flash
