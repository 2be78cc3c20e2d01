// One warp's attention: its own keys, its own online softmax.
#pragma once

#include "core/score_fragments.h"
#include "decode/new_rows.h"
#include "decode/products.h"

namespace flash::decode {

// The two rows of a tile whose accumulators a lane holds.
template <class Config>
struct LaneRows {
  static constexpr int kRows = 2;
  KeyLimits keys[kRows];  // none for a row that does not exist
  float slope[kRows];     // ALiBi

  __device__ LaneRows(FwdParams const& p, DecodeTile<Config> const& tile, FastDiv const& group,
                      FragmentCoord<1> coord) {
    Scores const& s = p.scores;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      bool const exists = coord.row(r) < tile.rows;
      QueryRow const row = tile.row(group, coord.row(r));
      keys[r] = exists ? tile.mask.limits(row.query) : KeyLimits{0, 0};
      slope[r] = exists && tile.is_sequence(p) ? s.alibi_slope(tile.sequence, row.head) : 0.f;
    }
  }
};

// Bits [begin, end) of 32.
__device__ inline unsigned bit_range(int begin, int end) {
  auto const below = [](int n) { return n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0u; };
  return below(end) & ~below(begin);
}

// O = P·V accumulators of one warp, and the softmax that is needed to merge them.
template <class Config>
struct WarpAccumulators {
  static constexpr int kRows = 2;
  decltype(zeros<typename Config::Grid, Config::kBlockM, Config::kHeadDimV>()) out;
  OnlineSoftmax<kRows> softmax;
  float out_factor = 1.f;  // O is so many times what `out` has

  __device__ explicit WarpAccumulators(float softmax_scale) : softmax(softmax_scale * kLog2e) {
    clear(out);
  }

  // (rows, columns) of O
  __device__ auto rows() { return make_tensor(out.data(), rows_and_columns(out.layout())); }

  __device__ void rescale(float const (&factor)[kRows]) { scale_rows(rows(), factor); }
};

// Scale, softcap and ALiBi of kernels with score mods; a row's slope is its head's. The row's query
// is computed anew each time, which saves two registers.
template <class Config, class Scores>
__device__ void apply_score_mod(Scores& s, FwdParams const& p, FastDiv const& group,
                                DecodeTile<Config> const& tile, LaneRows<Config> const& rows,
                                int key_begin, FragmentCoord<1> coord) {
#pragma unroll
  for (int r = 0; r < size<0>(s); ++r) {
    ScoreMod const mod{p.scores.softmax_scale, p.scores.softcap, rows.slope[r],
                       tile.info.seqlen_k - tile.info.seqlen_q};
    int const query = tile.row(group, coord.row(r)).query;
#pragma unroll
    for (int c = 0; c < size<1>(s); ++c) {
      s(r, c) = mod.score(s(r, c), query, key_begin + coord.col(c));
    }
  }
}

// Scores of keys that a row does not see, or that do not exist, become -inf.
template <class Config, class Scores>
__device__ void apply_limits(Scores& s, LaneRows<Config> const& rows, unsigned exist, int key_begin,
                             FragmentCoord<1> coord) {
#pragma unroll
  for (int r = 0; r < size<0>(s); ++r) {
    unsigned const seen =
        exist & bit_range(rows.keys[r].begin - key_begin, rows.keys[r].end - key_begin);
    unsigned const mine = seen >> coord.col0;
#pragma unroll
    for (int c = 0; c < size<1>(s); ++c) {
      s(r, c) = mine >> (c % 2 + c / 2 * 8) & 1 ? s(r, c) : -INFINITY;
    }
  }
}

// What the products with codes are multiplied by.
template <class Config>
struct CodeFactors {
  static constexpr int kRows = 2;
  CodeDescales const& codes;
  float of_scores[kRows];

  __device__ CodeFactors(CodeDescales const& codes_, float of_keys,
                         RowFactorStorage<Config> const& smem, FragmentCoord<1> coord)
      : codes(codes_) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      of_scores[r] = of_keys / kCodeFactor;
      if constexpr (Config::kHasRowFactors) {
        of_scores[r] *= smem.inverse_factors[coord.row(r)];
      }
    }
  }

  // descales: of the step's keys, where rows have some
  template <class Scores>
  __device__ void scale_scores(Scores& s, float const* descales, FragmentCoord<1> coord) const {
    scale_rows(s, of_scores);
    if (codes.k.of_rows) {
      scale_columns(s, descales, 1.f, coord);
    }
  }

  template <class Scores>
  __device__ void scale_probabilities(Scores& s, float const* descales,
                                      FragmentCoord<1> coord) const {
    if (codes.v.of_rows) {
      scale_columns(s, descales, kProbabilityFactor, coord);
    }
  }

 private:
  template <class Scores>
  __device__ static void scale_columns(Scores& s, float const* descales, float factor,
                                       FragmentCoord<1> coord) {
#pragma unroll
    for (int c = 0; c < size<1>(s); ++c) {
      float const scale = factor * descales[coord.col(c)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s(r, c) *= scale;
      }
    }
  }
};

// Fills the ring, and loads Q into `tile`, for all warps. Q is loaded first: it takes little code,
// and is wanted with the first keys.
template <bool kWritesRows, class Config>
__device__ void begin_loads(DecodeParams const& p, DecodeWork<Config> const& work,
                            KeyRing<Config>& ring, typename Config::Element* tile, int warp) {
  if constexpr (kWritesRows) {
    fill_with_new_rows(BlockRows<Config>(p, work, tile, warp), ring);
  } else {
    copy_queries<Config>(p.fwd, work.tile, p.group, tile);
    int stage = 0;
    ring.fill(stage, Config::kStages);
    cp_async_wait<2 * Config::kStages>();  // Q
    __syncthreads();
  }
}

// Attends to this warp's keys of the piece. kWritesRows: the call has new rows.
template <bool kWritesRows, class Config>
__device__ void attend(DecodeParams const& params, DecodeWork<Config> const& work,
                       DecodeStorage<Config>& smem, int warp, int lane,
                       WarpAccumulators<Config>& acc) {
  constexpr int kN = Config::kBlockN, kStages = Config::kStages;
  FwdParams const& p = params.fwd;
  FastDiv const& group = params.group;
  RingStorage<Config>& storage = smem.ring[warp];
  [[maybe_unused]] float of_keys = 1.f;
  if constexpr (Config::kCodes) {  // loaded here, needed later
    int const sequence = work.tile.sequence, head = work.tile.head_kv;
    bool const exists = work.tile.is_sequence(p) && work.tile.info.seqlen_k > 0;
    float const of_values = exists ? p.codes.v.of_head(sequence, head) : 1.f;
    of_keys = exists ? p.codes.k.of_head(sequence, head) : 1.f;
    acc.out_factor = of_values / (kCodeFactor * (p.codes.v.of_rows ? kProbabilityFactor : 1.f));
  }
  KeyRing<Config> ring(p, work, storage, warp, lane);
  begin_loads<kWritesRows>(params, work, ring, smem.q.data(), warp);
  if constexpr (Config::kHasRowFactors) {
    convert_queries<Config::kThreads, Config::kHeadDim, Config::kQueryStride>(smem.q.data(),
                                                                              smem.inverse_factors);
    __syncthreads();
  }
  FragmentCoord<1> const coord(lane);
  LaneRows<Config> const rows(p, work.tile, group, coord);
  [[maybe_unused]] auto const factors = [&] {
    if constexpr (Config::kCodes) {
      return CodeFactors<Config>(p.codes, of_keys, smem, coord);
    } else {
      return 0;
    }
  }();
  Tensor const q = read_queries<Config>(smem.q.data(), lane);
  int stage = 0;
  for (int key = work.begin + warp * kN, end = work.end; key < end; key += Config::kWarps * kN) {
    ring.wait();
    Tensor s_mma = scores<Config>(q, storage.k[stage].data(), lane);
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    if constexpr (Config::kCodes) {
      factors.scale_scores(s, storage.k_descales[stage], coord);
    }
    unsigned const exist = ring.existing();
    __syncwarp();
    ring.load_k(stage);

    if constexpr (Config::kScores == ScoreLevel::Full) {
      apply_score_mod(s, p, group, work.tile, rows, key, coord);
    }
    apply_limits(s, rows, exist, key, coord);
    float rescale[2];
    acc.softmax.template step<size<1>(s)>(s, rescale, QuadReduce{});
    if constexpr (Config::kCodes) {  // instructions count here
      if_any_in_warp(rescale[0] != 1.f || rescale[1] != 1.f, [&] { acc.rescale(rescale); });
    } else {
      acc.rescale(rescale);
    }
    if constexpr (Config::kCodes) {
      ring.wait();
      factors.scale_probabilities(s, storage.v_descales[stage], coord);
    }
    Tensor probabilities = convert<typename Config::Operand>(s_mma);
    if constexpr (!Config::kCodes) {
      ring.wait();
    }
    add_values<Config>(make_tensor(probabilities.data(), as_operand_a(probabilities.layout())),
                       storage.v[stage].data(), lane, acc.out);
    __syncwarp();
    ring.load_v(stage);
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  cp_async_wait<0>();
}

}  // namespace flash::decode
