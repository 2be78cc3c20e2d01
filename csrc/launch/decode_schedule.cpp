#include "launch/decode_schedule.h"

#include <algorithm>

#include "params/head_dims.h"

namespace flash {
namespace {

// Tiles of so many rows.
int row_blocks(int64_t rows, int block_m) {
  return static_cast<int>((rows + block_m - 1) / block_m);
}

// An upper bound of the row blocks of all sequences that are decoded.
int varlen_row_blocks(FwdParams const& p, int block_m) {
  Seqlens const& s = p.seqlens;
  bool const is_mixed = s.few_q != kAllQueries;
  int64_t const sequences = is_mixed ? s.batch : VarlenRows::count(s.batch);
  int64_t const all = plan::most_row_blocks(s.total_q, sequences, p.group(), block_m);
  int64_t const few = int64_t(s.batch) * row_blocks(int64_t(s.few_q) * p.group(), block_m);
  return static_cast<int>(is_mixed ? std::min(all, few) : all);
}

}  // namespace

bool decode_appends(FwdParams const& p, NewRows const& rows) {
  constexpr int kPairs = kPairsAtOnce;
  Rotary const& r = rows.rotary;
  auto const address = reinterpret_cast<uintptr_t>(r.cos) | reinterpret_cast<uintptr_t>(r.sin);
  bool const rotates =
      !r.cos || (r.rotary_dim % (2 * kPairs) == 0 && (r.cos_stride | r.sin_stride) % kPairs == 0 &&
                 address % (2 * kPairs) == 0);  // elements have two bytes
  // Kernels whose warps share keys write none.
  bool const shared = p.q_latent.ptr || is_wide(p.head_dim, p.head_dim_v);
  return p.seqlens.new_k <= kMostNewKeys && rotates && !shared;
}

PieceSchedule decode_schedule(Variant const& variant, FwdParams const& p,
                              plan::PieceCut const& cut) {
  Seqlens const& lengths = p.seqlens;
  bool const is_varlen = lengths.cu_q;
  int64_t const rows = int64_t(lengths.seqlen_q) * p.group();
  PieceSchedule s{};
  s.batch = lengths.batch;
  s.tiles = FastDiv(p.heads_kv * (is_varlen ? 1 : row_blocks(rows, variant.block_m)));
  s.varlen = is_varlen;
  s.all_row_blocks = is_varlen ? varlen_row_blocks(p, variant.block_m) : s.batch;
  s.equal =
      !is_varlen &&
      (s.batch == 1 || !(lengths.cu_k || lengths.used_k || lengths.leftpad_k || lengths.batch_k));
  s.min_units = cut.min_units;
  s.max_pieces = cut.max_pieces;
  s.slices = cut.slices;
  s.extra = cut.extra;
  s.cluster_log2 = cut.cluster_log2;
  return s;
}

int64_t decode_workspace(Variant const& variant, FwdParams const& p, PieceSchedule const& s) {
  if (s.max_pieces == 1) {
    return 0;
  }
  int64_t const pieces = num_pieces(s);
  int64_t const counters = pieces > kMostLastingCounters ? pieces : 0;
  return pieces * variant.block_m * (p.head_dim_v + 1) + counters;
}

DecodeParams decode_params(Variant const& variant, FwdParams const& p, PieceSchedule const& s,
                           float* workspace, bool beside, NewRows const& rows) {
  FastDiv const group(p.group()), heads_kv(p.heads_kv);
  DecodeParams params{p, group, heads_kv, s, nullptr, nullptr, nullptr, beside, rows};
  if (s.max_pieces > 1) {
    int64_t const pieces = num_pieces(s), rows = pieces * variant.block_m;
    params.partial_out = workspace;
    params.partial_lse = params.partial_out + rows * p.head_dim_v;
    // Between this launch and the one that it runs beside, clearing would keep them apart.
    if (pieces > kMostLastingCounters && !beside) {
      static_assert(sizeof(uint32_t) == sizeof(float));
      params.counters = reinterpret_cast<uint32_t*>(params.partial_lse + rows);
    }
  }
  return params;
}

}  // namespace flash
