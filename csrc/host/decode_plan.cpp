#include "host/decode_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>

#include "core/packed_rows.h"
#include "core/wanted_clusters.h"
#include "core/wanted_columns.h"
#include "host/key_splits.h"
#include "host/places.h"
#include "host/select.h"

namespace flash {
namespace {

// Three thread blocks at most, by registers.
Places places(Variant const& variant, DeviceInfo const& device) {
  constexpr int kMost = 3;
  return {device.sm_count, std::clamp(blocks_by_shared_memory(variant, device), 1, kMost)};
}

// Whether thread blocks have the GPU to themselves and little to do but to read. Hooks on scores
// take time, and so do keys that come without cp.async: with fewer blocks 16 x 8,192 keys of d 100
// took 1,129 µs instead of 433. Two warps, of d 256, were not measured.
bool reads_only(Variant const& variant, FwdParams const& p) {
  constexpr int kWarps = 4;
  bool const alone = !p.seqlens.cu_q || p.seqlens.few_q == kAllQueries;
  return alone && std::string_view(variant.scores) == "plain" && variant.warps >= kWarps;
}

// Query rows of a KV head up to which the decode kernel is worth a thought, and what one of its
// tiles holds.
constexpr int64_t kMaxRows = 64, kTileRows = 16;

int group_of(FwdParams const& p) { return p.heads_q / std::max(p.heads_kv, 1); }

// The most queries of a sequence, as far as the host can know.
int64_t longest_q(Seqlens const& s) {
  return s.cu_q ? std::min<int64_t>(s.seqlen_q, s.total_q) : s.seqlen_q;
}

int64_t packed_rows(FwdParams const& p) { return longest_q(p.seqlens) * group_of(p); }

int row_blocks(int64_t rows) { return static_cast<int>((rows + kTileRows - 1) / kTileRows); }

// Whether half of the GPU would be idle if every tile were one thread block's; three quarters, at
// the head dims whose tiles take longer.
bool leaves_room(FwdParams const& p, DeviceInfo const& device) {
  int64_t const row_tiles = row_blocks(packed_rows(p)), tiles = row_tiles * p.heads_kv;
  int const spare = p.head_dim > 128 ? 4 : 2;
  return spare * tiles * p.seqlens.batch <= device.sm_count;
}

// A piece of one unit is read in about the time that its merging takes.
constexpr int kMinUnits = 2;

// Many more sequences than the GPU holds at once balance by themselves, and save the search.
constexpr int kTilesPerBlock = 4;

// Dense calls with fewer keys gain nothing. On an H200: with 512 keys the same, with 4,096 1.2 to
// 2.8 times faster, with 32,768 up to 8.
constexpr int kFewKeys = 1024;

// Of a draft's window, and the like: a cluster for each tile has all keys, each block a few steps
// of them. On an H200, 8 queries of 8 heads on 2 that see 2,047 keys: 15.3 µs instead of 17.5.
bool clusters_have_all_keys(FwdParams const& p, int64_t num_splits, DeviceInfo const& device) {
  constexpr int kMostColumns = 128;  // larger head dims have no clusters
  constexpr int kMostBlocks = 2;
  constexpr int64_t kMostKeys = 4096;
  int const blocks = row_blocks(packed_rows(p));
  int64_t const tiles = int64_t(blocks) * p.heads_kv * p.seqlens.batch;
  return num_splits == 0 && std::max(p.head_dim, p.head_dim_v) <= kMostColumns &&
         blocks <= kMostBlocks && keys_of_block(p, longest_q(p.seqlens)) <= kMostKeys &&
         tiles << kMostClusterLog2 <= device.sm_count;
}

// Of pages, and more rows than a tile of decode's: it would read the keys again for each tile of
// them, where Hopper's forward reads them once for 64 rows, and cuts them as well. On an H200, 8
// queries of 4 heads: 152 µs instead of 198 (32 sequences, 4k keys), 60 instead of 67 (one, 32k).
bool forward_reads_pages_faster(FwdParams const& p, int64_t num_splits, DeviceInfo const& device) {
  Seqlens const& s = p.seqlens;
  int64_t const rows = s.cu_q ? s.total_q * group_of(p) / std::max(s.batch, 1) : packed_rows(p);
  return num_splits <= 1 && device.sm == 90 && rows > kTileRows && s.seqlen_k >= kFewKeys &&
         !p.batch_invariant && !p.scores.has_hooks() && page_layout(p) == PageLayout::Boxes &&
         !clusters_have_all_keys(p, num_splits, device);
}

}  // namespace

bool decodes_cache(FwdParams const& p, int64_t num_splits, DeviceInfo const& device) {
  if (packed_rows(p) > kMaxRows) {
    return false;
  }
  if (p.odd.any()) {
    return true;  // others need a copy of the cache
  }
  if (p.pages.table) {
    return !forward_reads_pages_faster(p, num_splits, device);
  }
  // Measured against Hopper's forward: up to 3 times faster with 64 rows.
  return device.sm != 90 || packed_rows(p) <= kTileRows || num_splits > 1 || leaves_room(p, device);
}

bool decode_appends(FwdParams const& p, NewRows const& rows) {
  // Four pairs at a time (sm80/decode/row_part.h), and never less.
  constexpr int kPairs = 4;
  Rotary const& r = rows.rotary;
  auto const address = reinterpret_cast<uintptr_t>(r.cos) | reinterpret_cast<uintptr_t>(r.sin);
  bool const turns =
      !r.cos || (r.rotary_dim % (2 * kPairs) == 0 && (r.cos_stride | r.sin_stride) % kPairs == 0 &&
                 address % (2 * kPairs) == 0);  // elements have two bytes
  return p.seqlens.new_k <= kMostNewKeys && turns;
}

bool decodes_dense(FwdParams const& p, DeviceInfo const& device) {
  int64_t const rows = packed_rows(p) * p.seqlens.batch;
  return rows > 0 && packed_rows(p) <= kMaxRows && p.seqlens.seqlen_k >= kFewKeys &&
         leaves_room(p, device) && p.scores.dropout_p == 0.f;
}

int few_queries(FwdParams const& p, int64_t num_splits, DeviceInfo const& device) {
  int64_t const rows = packed_rows(p);
  if (rows == 0 || p.seqlens.batch == 0 || p.scores.dropout_p > 0.f) {
    return 0;
  }
  bool const paged = p.pages.table;
  if (rows > kMaxRows) {
    // Others run beside it. A batch of one has them, or is wrong about its length.
    bool const mixed = paged && (p.seqlens.batch > 1 || p.batch_invariant);
    return mixed ? static_cast<int>(kMaxRows / group_of(p)) : 0;
  }
  bool const may = paged || (!p.batch_invariant && p.seqlens.seqlen_k >= kFewKeys);
  bool const decodes = may && decodes_cache(p, num_splits, device);
  return decodes ? kAllQueries : 0;
}

namespace {

// Row blocks of all sequences that are decoded, at most: who has any queries has a last one that
// lacks some rows, of whole queries.
int packed_row_blocks(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  bool const is_mixed = s.few_q != kAllQueries;
  int64_t const parts = is_mixed ? s.batch : PackedRows::count(s.batch);
  int64_t const lacking = kTileRows - std::gcd<int64_t>(group_of(p), kTileRows);
  int64_t const all =
      (s.total_q * group_of(p) + std::min<int64_t>(parts, s.total_q) * lacking) / kTileRows;
  int64_t const few = int64_t(s.batch) * row_blocks(int64_t(s.few_q) * group_of(p));
  return static_cast<int>(is_mixed ? std::min(all, few) : all);
}

// Builds for older GPUs alone run on Hopper as well, without the instructions that clusters need.
bool is_built_for_hopper() {
  static bool const has =
      std::ranges::any_of(variants(), [](Variant const& v) { return v.arch == 90; });
  return has;
}

// Each tile of a schedule that the host chose is a cluster's, uncut, if that is faster. Row blocks
// that the rows of a packed q might be, and are not, have clusters as well: few, or none at all.
void give_to_clusters(SplitSchedule& s, Variant const& variant, FwdParams const& p,
                      DeviceInfo const& device) {
  int64_t const queries = longest_q(p.seqlens);
  int const unit = variant.block_n * variant.warps;
  int64_t const units = (keys_of_block(p, queries) + unit - 1) / unit;
  int const rows = static_cast<int>(std::min(queries * group_of(p), kTileRows));
  int64_t const tiles = s.alike * int64_t(s.tiles.divisor);
  s.cluster_log2 = wanted_cluster_log2({rows, units, s.columns / s.alike, tiles}, device.sm_count);
  constexpr int kMostBlocks = 3;  // a multiprocessor
  int64_t const blocks = s.all_row_blocks * int64_t(s.tiles.divisor) << s.cluster_log2;
  if (s.cluster_log2 == 0 || blocks > kMostBlocks * int64_t(device.sm_count)) {
    s.cluster_log2 = 0;
    return;
  }
  s.max_splits = 1;
  s.blocks_per_sm = 0;
}

}  // namespace

SplitSchedule decode_schedule(Variant const& variant, FwdParams const& p, int num_splits,
                              DeviceInfo const& device) {
  Seqlens const& lengths = p.seqlens;
  bool const is_packed = lengths.cu_q, is_mixed = is_packed && lengths.few_q != kAllQueries;
  int64_t const queries = is_mixed ? lengths.few_q : longest_q(lengths);
  int const blocks = row_blocks(queries * group_of(p));
  int const tiles = p.heads_kv * (is_packed ? 1 : blocks);
  if (p.batch_invariant) {
    num_splits = 1;  // what is wanted depends on all of the batch
  }
  bool const choose = num_splits == 0;
  SplitSchedule s{};
  s.batch = lengths.batch;
  s.tiles = FastDiv(tiles);
  s.packed = is_packed;
  s.all_row_blocks = is_packed ? packed_row_blocks(p) : s.batch;
  bool const is_single = s.batch == 1;
  s.equal =
      !is_packed &&
      (is_single || !(lengths.cu_k || lengths.used_k || lengths.leftpad_k || lengths.batch_k));
  s.min_units = choose ? kMinUnits : 1;
  Places const gpu = places(variant, device);
  // What is cut alike. Beside long sequences those of one query are the most likely.
  BatchShape const shape{s.batch, is_packed && !is_mixed ? blocks : 1, tiles};
  s.alike = shape.row_blocks();
  ColumnPlan const plan = s.equal || is_single ? plan_of_one_length(shape, gpu)
                                               : plan_columns(shape, gpu, reads_only(variant, p));
  constexpr int kAny = std::numeric_limits<int>::max();
  s.columns = choose ? plan.columns : kAny;
  s.extra = choose ? plan.extra : kAny;
  s.whole = choose ? plan.whole : 0;
  s.blocks_per_sm = choose ? plan.blocks_per_sm : 0;
  if (num_splits == 1 || (choose && s.alike >= kTilesPerBlock * resident(tiles, gpu))) {
    s.max_splits = 1;
  } else {
    int const unit = variant.block_n * variant.warps;
    int64_t const units = (int64_t(lengths.seqlen_k) + unit - 1) / unit;
    int64_t const most = (units + s.min_units - 1) / s.min_units;
    s.max_splits = static_cast<int>(std::clamp<int64_t>(most, 1, choose ? kAny : num_splits));
  }
  bool const may_have_clusters = device.sm == 90 && is_built_for_hopper() && reads_only(variant, p);
  if (choose && s.max_splits > 1 && may_have_clusters) {
    give_to_clusters(s, variant, p, device);
  }
  return s;
}

int64_t decode_workspace(Variant const& variant, FwdParams const& p, SplitSchedule const& s) {
  return s.max_splits == 1 ? 0 : num_pieces(s) * variant.block_m * (p.head_dim_v + 1);
}

DecodeParams decode_params(Variant const& variant, FwdParams const& p, SplitSchedule const& s,
                           float* workspace, bool beside, NewRows const& rows) {
  FastDiv const group(p.heads_q / p.heads_kv), heads_kv(p.heads_kv);
  DecodeParams params{p, group, heads_kv, s, nullptr, nullptr, nullptr, beside, rows};
  if (s.max_splits > 1) {
    int64_t const rows = num_pieces(s) * variant.block_m;
    params.partial_out = workspace;
    params.partial_lse = params.partial_out + rows * p.head_dim_v;
  }
  return params;
}

}  // namespace flash
