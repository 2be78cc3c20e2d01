// Where the splits of a forward leave what they find, and how that is merged.
#pragma once

#include "host/variant.h"

namespace flash {

// Rows up to which all splits of a row, kMostPartsAtOnce of them, are asked for at once when they
// are merged: one wait, instead of one for their LSE and one for each four splits. On an H200, 256
// rows, 16 splits: -6.4% of the call; but that takes 16 splits' registers, with which 4,096 rows
// took 4 µs more.
constexpr int kMostRowsAtOnce = 512;

// Of all heads; each has a result of each split.
inline int64_t rows_of_splits(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return p.heads_q * (s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q);
}

inline bool merges_at_once(FwdParams const& p) {
  return rows_of_splits(p) <= kMostRowsAtOnce && p.splits.count.divisor <= kMostPartsAtOnce;
}

// Floats of the splits' results.
int64_t key_splits_workspace(FwdParams const& params, int splits);

// params.splits, with that workspace.
KeySplits place_key_splits(FwdParams const& params, int splits, float* workspace);

}  // namespace flash
