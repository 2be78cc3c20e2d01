#include "host/last_rows.h"

#include "core/row_block_cost.h"
#include "host/head_packing.h"
#include "host/key_splits.h"
#include "host/second_tile.h"

namespace flash {
namespace {

// What the results of parts may take.
constexpr int64_t kMostBytes = 64 << 20;

// Lengths that are known, nothing that hides keys, and nothing that forbids parts.
bool may_cut(FwdParams const& p, Variant const& variant) {
  Seqlens const& s = p.seqlens;
  bool const fixed = !s.cu_q && !s.cu_k && !s.used_k && !s.leftpad_k && !s.batch_k && !s.new_k;
  bool const full = !limits(p.mask.left, s) && !limits(p.mask.right, s);
  return cuts_keys(p, variant) && fixed && full && !p.pages.table && !p.batch_invariant &&
         s.batch > 0 && p.heads_q > 0 && s.seqlen_q > 0 && s.seqlen_k > 0;
}

// Of a row block of 128 rows, for each key of its cost: on an H200 a step of 128 keys takes 1.47 µs
// at d 128, one of 112 1.87 at d 192, one of 80 1.76 at d 256.
double key_time(Variant const& variant) {
  constexpr double kRows = 128, kKey = 0.0025, kColumn = 0.000027;
  return variant.block_m / kRows * (kKey + kColumn * (variant.head_dim + variant.head_dim_v));
}

EqualRowBlocks row_blocks(FwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  // A part's rows go out in fp32, from registers; merged, they come from L2, 3 TB/s.
  constexpr double kBytesTime = 1. / 3e6, kStoreKeys = 0.5;
  int64_t const row_bytes = (p.head_dim_v + 1) * int64_t(sizeof(float));
  Seqlens const& s = p.seqlens;
  KeyTile const tile{variant.head_dim, variant.head_dim_v, variant.block_m, variant.block_n,
                     variant.stages};
  KeyTile const taken = tile.with(keys_of_tile(variant, p));
  double const time = key_time(variant);
  auto const steps = [&](KeyTile const& t) { return (s.seqlen_k - 1) / t.block_n + 1; };
  double const step = time * (tile.block_n + kStepKeys);
  return {s.seqlen_q,
          tile.block_m,
          int64_t(s.batch) * p.heads_q,
          queries_of_part(p, variant),
          int64_t(s.batch) * p.heads_kv,
          device.sm_count,
          time * row_block_cost(steps(taken), taken),
          steps(tile),
          step,
          step + time * kStoreKeys * variant.head_dim_v,
          double(row_bytes) * kBytesTime * p.heads_q / p.heads_kv,
          kMostBytes / row_bytes};
}

}  // namespace

LastRows last_rows(FwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  if (!may_cut(p, variant) || packed_queries(p, variant.block_m, /*plain=*/true) > 0) {
    return {};
  }
  return best_last_rows(row_blocks(p, variant, device));
}

FwdParams with_rows(FwdParams p, int begin, int end) {
  constexpr int kElementBytes = 2;
  p.q.ptr = static_cast<char const*>(p.q.ptr) + begin * p.q.row_stride * kElementBytes;
  p.out.ptr = static_cast<char*>(p.out.ptr) + begin * p.out.row_stride * kElementBytes;
  p.lse.ptr += begin;
  p.seqlens.seqlen_q = end - begin;
  // Wide limits, which hide nothing, are not counted from the rows that are left.
  p.mask = {-1, -1};
  return p;
}

}  // namespace flash
