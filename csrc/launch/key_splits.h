// The workspace for the results of a forward's KV splits, and which kernel merges them.
#pragma once

#include "launch/variant.h"

namespace flash {

// Up to so many rows, the merge loads all splits of a row, up to kMostSplitsAtOnce, at once: it
// waits once, instead of once for the LSE and once for each four splits. On an H200, 256 rows and
// 16 splits: -6.4% of the call. But it takes the registers of 16 splits, with which 4,096 rows took
// 4 µs more.
constexpr int kMostRowsAtOnce = 512;

// Rows of all heads; each has a result of each split.
inline int64_t rows_of_splits(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return p.heads_q * (s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q);
}

inline bool merges_at_once(FwdParams const& p) {
  return rows_of_splits(p) <= kMostRowsAtOnce && p.splits.count.divisor <= kMostSplitsAtOnce;
}

// Floats that the splits' results take.
int64_t key_splits_workspace(FwdParams const& params, int splits);

// The value of params.splits, with the results in that workspace.
KeySplits place_key_splits(FwdParams const& params, int splits, float* workspace);

}  // namespace flash
