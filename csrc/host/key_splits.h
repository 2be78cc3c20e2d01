// Into how many parts a forward with few row blocks cuts their keys, and where these leave what
// they find.
#pragma once

#include "host/variant.h"

namespace flash {

// Rows up to which all parts of a row, kMostPartsAtOnce of them, are asked for at once when they
// are merged: one wait, instead of one for their LSE and one for each four parts. On an H200, 256
// rows, 16 parts: -6.4% of the call; but that takes 16 parts' registers, with which 4,096 rows took
// 4 µs more.
constexpr int kMostRowsAtOnce = 512;

// Of all heads; each has a result of each part.
inline int64_t rows_of_parts(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return p.heads_q * (s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q);
}

inline bool merges_at_once(FwdParams const& p) {
  return rows_of_parts(p) <= kMostRowsAtOnce && p.splits.count.divisor <= kMostPartsAtOnce;
}

// Whether a row has a kernel for parts of such a call.
bool cuts_keys(FwdParams const& params, Variant const& variant);

// Of its row blocks. Heads of a KV head share them where keys are cut: fewer row blocks, more parts
// of each.
int queries_of_part(FwdParams const& params, Variant const& variant);

// Of a sequence, that a block of so many of its queries goes through, at most.
int64_t keys_of_block(FwdParams const& params, int64_t queries);

// 1: none are cut. By the call and the GPU alone, never by the lengths, which only the device
// knows. num_splits: no more than that, if not 0.
int key_splits(FwdParams const& params, Variant const& variant, DeviceInfo const& device,
               int64_t num_splits);

// Floats of the parts' results.
int64_t key_splits_workspace(FwdParams const& params, int splits);

// params.splits, with that workspace.
KeySplits place_key_splits(FwdParams const& params, int splits, float* workspace);

}  // namespace flash
