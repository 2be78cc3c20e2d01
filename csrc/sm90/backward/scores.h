// A thread's numbers of a warpgroup's transposed scores (64 keys x kBlockM rows): from scores to
// probabilities, and from the probabilities' gradient to the scores'.
#pragma once

#include "core/score_fragments.h"
#include "passes/backward/transposed_scores.h"
#include "sm90/backward/key_block.h"

namespace flash::sm90::backward {

// One number of each row, LSE or D, for the columns of a thread, read when it is asked for.
struct RowNumbers {
  float const* of_rows;
  FragmentCoord<4> coord;

  // The numbers of the rows that are columns c and c + 1.
  __device__ float2 operator()(int c) const {
    return *reinterpret_cast<float2 const*>(&of_rows[coord.col(c)]);
  }
};

// The same, read at once where there are registers for it: shared memory that feeds products
// is slow to return.
template <int kColumns>
struct RowNumbersAhead {
  float2 number[kColumns / 2];

  RowNumbersAhead() = default;
  __device__ explicit RowNumbersAhead(RowNumbers const& from) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      number[c / 2] = from(c);
    }
  }
  __device__ float2 operator()(int c) const { return number[c / 2]; }
};

template <bool kMasked, class Config>
struct ScoreTile {
  static constexpr bool kFull = Config::kScores == ScoreLevel::Full;
  static constexpr bool kCountsIterations = Config::kCountsIterations;
  static constexpr bool kReadsAhead = Config::kReadsAhead;
  static constexpr bool kScansAhead = false;
  static constexpr int kRows = 2;
  static constexpr int kColumns = Config::kBlockM / 4;

  BwdParams const& p;
  KeyBlock<Config> const& block;
  int head;       // query head
  int row_begin;  // of the row block, in the sequence
  int key_begin;  // of the warpgroup's keys
  FragmentCoord<4> coord;
  KeepBits<kRows, kColumns> keep;  // with dropout

  __device__ ScoreTile(BackwardArgs const& args, KeyBlock<Config> const& block_, int head_,
                       int m_block, int warpgroup, int thread)
      : p(args.params),
        block(block_),
        head(block_.head_begin + head_),
        row_begin(m_block * Config::kBlockM),
        key_begin(block_.key_begin + warpgroup * kWarpgroupRows),
        coord(thread) {}
  __device__ ScoreTile(BackwardArgs const& args, KeyBlock<Config> const& block_,
                       RowIteration const& rows, int warpgroup, int thread)
      : ScoreTile(args, block_, rows.head, rows.m_block, warpgroup, thread) {}

  // Writes the probabilities by which the values are multiplied to `operand`, in 16 bits. The
  // factors of score_gradients take the place of the scores: probabilities before dropout, times
  // the softcap's derivative.
  template <class Scores, class Words, class Lse>
  __device__ __forceinline__ void probabilities(Scores& s_mma, Words& operand, Lse const& lse) {
    using Element = typename Config::Element;
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    if constexpr (!kFull) {
      exponentiate(s, p.scores.softmax_scale * kLog2e, lse);
      pack<Element>(s_mma, operand);
    } else {
      apply_score_mods(s_mma, operand, lse);
      if (drops()) {
        drop(s_mma, operand);
      }
    }
  }

  // dP → dS / softmax_scale, in place. Under dropout both are (1 - dropout_p) times that.
  template <class Gradient, class Factors, class Words, class Delta>
  __device__ __forceinline__ void score_gradients(Gradient& dp_mma, Factors const& factors,
                                                  Words const& /*operand*/,
                                                  Delta const& softmax_d) const {
    if constexpr (kFull) {
      if (drops()) {
        Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
        keep.apply(dp);
      }
    }
    multiply(dp_mma, factors, softmax_d);
  }

 protected:
  // The same for a dP without dropped entries.
  template <class Gradient, class Factors, class Delta>
  __device__ __forceinline__ static void multiply(Gradient& dp_mma, Factors const& factors,
                                                  Delta const& softmax_d) {
    Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      float2 const delta = softmax_d(c);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dp(r, c) -= delta.x;
        dp(r, c + 1) -= delta.y;
      }
    }
#pragma unroll
    for (int i = 0; i < size(dp_mma); ++i) {
      dp_mma(i) *= factors(i);
    }
  }

  __device__ bool drops() const { return kFull && p.scores.dropout_p > 0.f; }

  __device__ ScoreMod score_mod() const {
    return {p.scores.softmax_scale, p.scores.softcap, p.scores.alibi_slope(block.tile.batch, head),
            block.shift};
  }

  // Clears dropped entries in an operand's words, which are laid out as the scores.
  template <class Scores, class Words>
  __device__ __forceinline__ void drop(Scores const& s_mma, Words& operand) {
    auto const layout = rows_and_columns(s_mma.layout());
    keep.template draw<Config::kHalfFactors>({p.scores, block.tile.batch, p.heads_q, head},
                                             row_begin, key_begin, coord);
    for_each_pair(
        [&](int r, int c) { keep.apply_to_pair(operand.data()[layout(r, c) / 2], r, c); });
  }

  // Two neighbouring queries of a key are a word of the operand.
  template <int kBegin = 0, int kEnd = kColumns, class Iteration>
  __device__ __forceinline__ static void for_each_pair(Iteration iteration) {
#pragma unroll
    for (int c = kBegin; c < kEnd; c += 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        iteration(r, c);
      }
    }
  }

  // A query's LSE, or infinity for a key that it does not see: its probability is then 0.
  template <bool kLimited>
  __device__ __forceinline__ float seen(float lse, int r, int c) const {
    if constexpr (!kLimited) {
      return lse;
    }
    KeyLimits const keys = block.mask.limits(row_begin + coord.col(c));
    int const key = key_begin + coord.row(r);
    return key < keys.begin || key >= keys.end ? INFINITY : lse;
  }

  // A pair at a time, so that derivatives need no registers beside the scores'.
  template <bool kLimited, class Scores, class Words, class Lse, class Mod>
  __device__ __forceinline__ void exponentiate_modified(Scores& s_mma, Words& operand,
                                                        Lse const& lse_log2, Mod const& mod) const {
    using Element = typename Config::Element;
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    for_each_pair([&](int r, int c) {
      float2 const lse = lse_log2(c);
      ModifiedScore const a = mod(s(r, c), seen<kLimited>(lse.x, r, c), r, c);
      ModifiedScore const b = mod(s(r, c + 1), seen<kLimited>(lse.y, r, c + 1), r, c + 1);
      float const pa = exp2_fast(a.log2), pb = exp2_fast(b.log2);
      operand.data()[s.layout()(r, c) / 2] = pack_pair<Element>(pa, pb);
      s(r, c) = pa * a.slope;
      s(r, c + 1) = pb * b.slope;
    });
  }

 private:
  // The conditions are the same for a whole tile, so they stand outside the loops over its scores.
  template <class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_score_mods(Scores& s, Words& operand,
                                                   Lse const& lse) const {
    ScoreMod const mod = score_mod();
    float const scale_log2 = mod.softmax_scale * kLog2e;
    TransposedBias const bias(mod, row_begin + coord.col(0), key_begin + coord.row(0));
    if (mod.softcap > 0.f) {
      SmallCap const small(mod);
      float const inverse_cap = reciprocal_fast(mod.softcap);
      if (bias.sign < 0.f || __any_sync(0xffffffffu, largest_score(s) > small.limit)) {
        CapMod const cap{2.f * scale_log2 * inverse_cap, bias.sign * mod.softcap * kLog2e, bias};
        exponentiate_modified<kMasked>(s, operand, lse, cap);
      } else {
        exponentiate_modified<kMasked>(s, operand, lse, SmallCapMod{small, inverse_cap, bias});
      }
    } else if (mod.alibi_slope != 0.f) {
      exponentiate_modified<kMasked>(s, operand, lse, BiasMod{bias.sign * scale_log2, bias});
    } else {
      exponentiate_modified<kMasked>(s, operand, lse, ScaleMod{scale_log2});
    }
  }

  // exp2(score * scale_log2 - LSE); rows that do not exist or saw no key have LSE +inf.
  template <class Scores, class Lse>
  __device__ __forceinline__ void exponentiate(Scores& s, float scale_log2,
                                               Lse const& lse_log2) const {
    if constexpr (kMasked) {
      apply_mask_transposed(s, block.mask, row_begin, key_begin, coord);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      float2 const lse = lse_log2(c);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s(r, c) = exp2_fast(s(r, c) * scale_log2 - lse.x);
        s(r, c + 1) = exp2_fast(s(r, c + 1) * scale_log2 - lse.y);
      }
    }
  }
};

}  // namespace flash::sm90::backward
