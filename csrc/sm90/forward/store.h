// Stores LSE and O from registers to global memory.
#pragma once

#include "sm90/forward/max_logits.h"
#include "sm90/store_rows.h"

namespace flash::sm90::forward {

struct OutputRow {
  QueryRow row;  // of the row block
  bool exists;
};

template <bool kPackGqa>
__device__ OutputRow output_row(RowPacking const& packing, int warpgroup, int row, int queries) {
  if constexpr (!kPackGqa) {
    int const query = warpgroup * kWarpgroupRows + row;
    return {{query, 0}, query < queries};
  } else {
    QueryRow const own = query_row(packing.heads, row);
    int const query = warpgroup * packing.queries + own.query;
    return {{query, own.head}, own.query < packing.queries && query < queries};
  }
}

// The largest logits of a thread's rows, for calls that ask for them or for those of heads.
template <class Config>
__device__ __forceinline__ void keep_largest(ForwardArgs const& args, RowBlock<Config> const& block,
                                             SharedStorage<Config>& smem, int warpgroup, int thread,
                                             Accumulators<Config> const& acc,
                                             float const (&lse)[Accumulators<Config>::kRows]) {
  FwdParams const& p = args.params;
  if (!p.max_logits.wanted()) {
    return;
  }
  OwnRow const own;
  float const scale = Config::kScores == ScoreLevel::Plain ? p.scores.softmax_scale
                                                           : block.score_mod.exponent_scale();
  float const top = largest_score_of_row(smem, acc, own);
  auto const& softmax = acc.softmax;
  bool const saw_key = own.of(softmax.max[0], softmax.max[1]) > softmax.no_key();
  float const logit = max_logit(saw_key, top, scale, own.of(lse[0], lse[1]));
  FragmentCoord<4> const coord(thread);
  OutputRow const at = output_row<Config::kPackGqa>(args.rows, warpgroup,
                                                    own.of(coord.row(0), coord.row(1)), block.rows);
  if (p.max_logits.of_heads) {
    raise_heads(args, block, at.row.head, at.exists ? logit : -INFINITY);
  } else {
    float* const to = block.lse + at.row.query + at.row.head * p.lse.head_stride;
    store_if(thread % 4 < 2 && at.exists, to + p.max_logits.to_row, logit);
  }
}

// Writes LSE [rows] of a warpgroup, and largest logits for calls that ask for them; computes what O
// is to be multiplied by.
template <class Config>
__device__ __forceinline__ void finish_rows(ForwardArgs const& args, RowBlock<Config> const& block,
                                            SharedStorage<Config>& smem, int warpgroup, int thread,
                                            Accumulators<Config>& acc) {
  constexpr int kRows = Accumulators<Config>::kRows;
  constexpr bool kPackGqa = Config::kPackGqa;
  FwdParams const& p = args.params;
  FragmentCoord<4> const coord(thread);
  int const quad_lane = thread % 4;
  float const keep_scale =
      Config::kScores == ScoreLevel::Full ? reciprocal_fast(1.f - p.scores.dropout_p) : 1.f;
  float row_lse[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    OutputRow const at = output_row<kPackGqa>(args.rows, warpgroup, coord.row(r), block.rows);
    QueryRow const& row = at.row;
    float const sink = p.scores.s_aux && block.sinks ? block.sinks[row.head] : -INFINITY;
    auto const finished = acc.softmax.finish(r, sink, QuadReduce{});
    acc.scale[r] = finished.out_scale * keep_scale;
    if constexpr (Config::kCodes) {
      acc.scale[r] *= block.value_scale;
    }
    int64_t const lse_apart = Config::kSplit ? p.splits.lse.head_stride : p.lse.head_stride;
    float* const lse = block.lse + row.query + (kPackGqa ? row.head * lse_apart : 0);
    store_if(quad_lane == 0 && at.exists, lse, finished.lse);
    row_lse[r] = finished.lse;
  }
  if constexpr (Config::kMaxLogits != MaxLogitsIn::None) {
    keep_largest(args, block, smem, warpgroup, thread, acc, row_lse);
  }
}

// Writes O [rows, head_dim_v] of a KV split, in fp32 to the workspace.
template <class Config>
__device__ void store_split(ForwardArgs const& args, RowBlock<Config> const& block, int warpgroup,
                            int thread, Accumulators<Config>& acc) {
  FwdParams const& p = args.params;
  FragmentCoord<4> const coord(thread);
  Tensor o = acc.rows();
#pragma unroll
  for (int r = 0; r < Accumulators<Config>::kRows; ++r) {
    OutputRow const at =
        output_row<Config::kPackGqa>(args.rows, warpgroup, coord.row(r), block.rows);
    int const columns = at.exists ? p.head_dim_v : 0;
    float* const target = block.out + at.row.query * p.splits.out.row_stride +
                          at.row.head * p.splits.out.head_stride + thread % 4 * 2;
#pragma unroll
    for (int eight = 0; eight < Config::kHeadDimV / 8; ++eight) {
      store_if(eight * 8 < columns, target + eight * 8,
               float2{o(r, 2 * eight), o(r, 2 * eight + 1)});
    }
  }
}

// Writes what store_tile.h leaves of O [rows, head_dim] of a warpgroup, straight from registers.
template <class Config>
__device__ void store(ForwardArgs const& args, RowBlock<Config> const& block, int warpgroup,
                      int thread, Accumulators<Config>& acc) {
  using Element = typename Config::Element;
  constexpr int kRows = Accumulators<Config>::kRows;
  constexpr bool kPackGqa = Config::kPackGqa;
  FwdParams const& p = args.params;
  FragmentCoord<4> const coord(thread);
  int const quad_lane = thread % 4;
  constexpr int kBegin = Config::kTileColumns, kEights = (Config::kHeadDimV - kBegin) / 8;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
  // A thread has two columns of every eight, in two rows.
  Tensor rest = make_tensor(acc.out.data() + kBegin / 2, Layout<Int<kEights * 4>>{});
  pack_out<Config>(p, rest, pairs);
  bool const odd = quad_lane % 2;
  int const column = kBegin + (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    OutputRow const at = output_row<kPackGqa>(args.rows, warpgroup, coord.row(r), block.rows);
    int const columns = at.exists ? p.head_dim_v : 0;
    QueryRow const& row = at.row;
    Element* const target = block.out + row.query * p.out.row_stride +
                            (kPackGqa ? row.head * p.out.head_stride : 0) + column;
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
      store_if(column + eight * 8 < columns, target + eight * 8,
               halves_of_eights(pairs(r, eight), pairs(r, eight + 1), odd));
    }
  }
}

}  // namespace flash::sm90::forward
