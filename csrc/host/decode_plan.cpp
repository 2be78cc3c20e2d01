#include "host/decode_plan.h"

#include <algorithm>
#include <limits>

namespace flash {
namespace {

// Thread blocks that a multiprocessor holds: by shared memory, of which it has 1 KiB more than a
// block can get, and takes 1 KiB per block; three at most, by registers.
int resident_blocks(Variant const& variant, DeviceInfo const& device) {
  constexpr int kKiB = 1024, kMost = 3;
  int const by_smem = (device.smem_per_block + kKiB) / (variant.smem_bytes + kKiB);
  return device.sm_count * std::clamp(by_smem, 1, kMost);
}

// A piece of one unit is read in about the time that its merging takes.
constexpr int kMinUnits = 2;

// Many more sequences than the GPU holds at once balance by themselves, and save the search.
constexpr int kTilesPerBlock = 4;

// Columns of pieces to cut a batch of one length into: what fills the GPU once, unless whole
// pieces of each sequence leave more than a tenth of it idle; then the first of up to four times
// that leaves less, or the best of them.
int64_t wanted_columns(int batch, int64_t resident) {
  constexpr int kMostRounds = 4;
  constexpr double kEnough = 0.9;
  auto const used = [&](int64_t columns) {
    return double(std::max<int64_t>(columns / batch, 1) * batch) / double(columns);
  };
  int64_t best = 0;
  for (int64_t columns = resident; columns <= kMostRounds * resident; columns += resident) {
    if (columns >= batch && (best == 0 || (used(best) < kEnough && used(columns) > used(best)))) {
      best = columns;
    }
  }
  return best > 0 ? best : resident;
}

}  // namespace

SplitSchedule decode_schedule(Variant const& variant, FwdParams const& p, int num_splits,
                              DeviceInfo const& device) {
  int64_t const rows = int64_t(p.seqlens.seqlen_q) * (p.heads_q / p.heads_kv);
  int64_t const row_blocks = (rows + variant.block_m - 1) / variant.block_m;
  bool const choose = num_splits == 0;
  SplitSchedule s{};
  s.batch = p.seqlens.batch;
  s.tiles = static_cast<int>(p.heads_kv * row_blocks);
  s.unit = variant.block_n * variant.warps;
  s.min_units = choose ? kMinUnits : 1;
  int64_t const resident = std::max<int64_t>(resident_blocks(variant, device) / s.tiles, 1);
  s.wanted = choose ? static_cast<int>(wanted_columns(std::max(s.batch, 1), resident) * s.tiles)
                    : std::numeric_limits<int>::max();
  if (num_splits == 1 || (choose && s.batch >= kTilesPerBlock * resident)) {
    s.max_splits = 1;
  } else {
    int64_t const units = (int64_t(p.seqlens.seqlen_k) + s.unit - 1) / s.unit;
    int64_t const most = (units + s.min_units - 1) / s.min_units;
    s.max_splits = static_cast<int>(
        std::clamp<int64_t>(most, 1, choose ? std::numeric_limits<int>::max() : num_splits));
  }
  return s;
}

int64_t decode_workspace(Variant const& variant, FwdParams const& p, SplitSchedule const& s) {
  if (s.max_splits == 1) {
    return 0;
  }
  static_assert(sizeof(SequenceSplits) == 2 * sizeof(float));
  return num_pieces(s) * variant.block_m * (p.head_dim_v + 1) + 2 * int64_t(s.batch);
}

DecodeParams decode_params(Variant const& variant, FwdParams const& p, SplitSchedule const& s,
                           float* workspace) {
  DecodeParams params{p, FastDiv(p.heads_q / p.heads_kv), s, nullptr, nullptr, nullptr};
  if (s.max_splits > 1) {
    int64_t const rows = num_pieces(s) * variant.block_m;
    params.partial_out = workspace;
    params.partial_lse = workspace + rows * p.head_dim_v;
    params.sequence_splits = reinterpret_cast<SequenceSplits*>(params.partial_lse + rows);
  }
  return params;
}

}  // namespace flash
