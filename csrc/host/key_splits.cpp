#include "host/key_splits.h"

#include <algorithm>
#include <string_view>

#include "core/work_tile.h"

namespace flash {
namespace {

// Of a warpgroup, which has that many rows of Hopper's forward.
constexpr int kWarpgroupRows = 64;

// A part of fewer key blocks takes less time than its merging, unless a row's parts are merged at
// once: those may have a block each. On an H200, 8 queries that see 2,047 keys each, 2 KV heads: in
// 4 parts 19.6 µs, in 8 17.3, in 16 that are merged at once 11% less (behind writes 15%).
constexpr int kMinBlocks = 2;

// One lane each when they are merged.
constexpr int kMostSplits = 32;

// Parts on each multiprocessor, should there be more rows than are said of the longest sequence.
// Those of no sequence take no time; but all rows are in the workspace, once for each part.
constexpr int kMostRounds = 8;

int64_t row_blocks(FwdParams const& p, int queries) {
  Seqlens const& s = p.seqlens;
  int64_t const of_longest = int64_t(s.batch) * num_m_blocks(s.seqlen_q, queries);
  int64_t const of_all = (s.total_q + int64_t(s.batch) * (queries - 1)) / queries;
  return (s.cu_q ? std::min(of_longest, of_all) : of_longest) * p.heads_kv;
}

// Of all rows there are, whatever is said of the longest sequence.
int64_t fewest_row_blocks(FwdParams const& p, int queries) {
  Seqlens const& s = p.seqlens;
  return (s.cu_q ? (s.total_q + queries - 1) / queries : 1) * p.heads_kv;
}

// As many parts as are worth it.
int64_t parts_by_keys(FwdParams const& p, int queries, int block_n) {
  int64_t const blocks = keys_of_block(p, queries) / block_n, by_merging = blocks / kMinBlocks;
  return rows_of_parts(p) <= kMostRowsAtOnce
             ? std::max(by_merging, std::min<int64_t>(blocks, kMostPartsAtOnce))
             : by_merging;
}

}  // namespace

bool cuts_keys(FwdParams const& p, Variant const& variant) {
  return variant.arch == 90 && std::string_view(variant.scores) == "plain" && p.heads_kv > 0 &&
         p.heads_q / p.heads_kv <= kWarpgroupRows && p.q.head_stride != 0;
}

int queries_of_part(FwdParams const& p, Variant const& variant) {
  return variant.block_m / kWarpgroupRows * (kWarpgroupRows / (p.heads_q / p.heads_kv));
}

int64_t keys_of_block(FwdParams const& p, int64_t queries) {
  Mask const& m = p.mask;
  int64_t const seqlen_k = p.seqlens.seqlen_k;
  return m.left < 0 || m.right < 0 ? seqlen_k
                                   : std::min(seqlen_k, int64_t(m.left) + m.right + queries);
}

int key_splits(FwdParams const& p, Variant const& variant, DeviceInfo const& device,
               int64_t num_splits) {
  // Without sequences there are no keys, whatever rows there are.
  bool const has_rows = p.seqlens.batch > 0 && rows_of_parts(p) > 0;
  // Beside decode the GPU is full; and nobody else's presence may change a sequence's bits.
  if (!cuts_keys(p, variant) || !has_rows || p.batch_invariant || p.seqlens.few_q > 0) {
    return 1;
  }
  int const queries = queries_of_part(p, variant);
  // None, if the caller says that the longest sequence has no rows.
  int64_t const by_places = device.sm_count / std::max<int64_t>(row_blocks(p, queries), 1);
  int64_t const by_keys = parts_by_keys(p, queries, variant.block_n);
  int64_t const by_memory = kMostRounds * device.sm_count / fewest_row_blocks(p, queries);
  int64_t const most = num_splits > 0 ? std::min<int64_t>(num_splits, kMostSplits) : kMostSplits;
  return static_cast<int>(std::clamp<int64_t>(std::min({by_places, by_keys, by_memory}), 1, most));
}

int64_t key_splits_workspace(FwdParams const& p, int splits) {
  return splits == 1 ? 0 : splits * rows_of_parts(p) * (p.head_dim_v + 1);
}

KeySplits place_key_splits(FwdParams const& p, int splits, float* workspace) {
  Seqlens const& s = p.seqlens;
  int64_t const length = s.cu_q ? s.total_q : s.seqlen_q, row = int64_t(p.heads_q) * p.head_dim_v;
  int64_t const numbers = rows_of_parts(p) * p.head_dim_v;
  return {FastDiv(splits),
          {workspace, s.cu_q ? 0 : length * row, row, p.head_dim_v},
          {workspace + splits * numbers, s.cu_q ? 0 : length * p.heads_q, length},
          numbers,
          rows_of_parts(p)};
}

}  // namespace flash
