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
inline int64_t key_splits_workspace(FwdParams const& p, int splits) {
  return splits == 1 ? 0 : splits * rows_of_splits(p) * (p.head_dim_v + 1);
}

// The value of params.splits, with the results in that workspace.
inline KeySplits place_key_splits(FwdParams const& p, int splits, float* workspace) {
  Seqlens const& s = p.seqlens;
  int64_t const length = s.cu_q ? s.total_q : s.seqlen_q, row = int64_t(p.heads_q) * p.head_dim_v;
  int64_t const numbers = rows_of_splits(p) * p.head_dim_v;
  return {FastDiv(splits),
          {workspace, s.cu_q ? 0 : length * row, row, p.head_dim_v},
          {workspace + splits * numbers, s.cu_q ? 0 : length * p.heads_q, length},
          numbers,
          rows_of_splits(p)};
}

}  // namespace flash
