#include "launch/key_splits.h"

namespace flash {

int64_t key_splits_workspace(FwdParams const& p, int splits) {
  return splits == 1 ? 0 : splits * rows_of_splits(p) * (p.head_dim_v + 1);
}

KeySplits place_key_splits(FwdParams const& p, int splits, float* workspace) {
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
