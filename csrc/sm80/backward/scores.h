// A thread's numbers of one pass over a tile of transposed scores (keys x queries): from scores to
// probabilities, and from the probabilities' gradient to the scores'.
#pragma once

#include "passes/backward/transposed_scores.h"
#include "sm80/backward/key_block.h"

namespace flash::sm80 {

template <bool kMasked, class Config>
struct ScoreTile {
  using Element = typename Config::Element;
  static constexpr bool kFull = Config::kScores == ScoreLevel::Full;
  static constexpr int kRows = Config::kBlockN / Config::kKeyWarps / 8;
  static constexpr int kColumns = Config::kPassM / Config::kScoreWarps / 4;

  BwdParams const& p;
  KeyBlock<Config> const& block;
  RowStats<Config::kBlockM> const& stats;
  int head;
  int pass_begin;  // first column of this pass, in the tile
  int row_begin;   // and its row in the sequence
  GridCoord<typename Config::ScoreGrid> coord;
  KeepBits<kRows, kColumns> keep;  // with dropout

  __device__ ScoreTile(BwdParams const& p_, KeyBlock<Config> const& block_,
                       RowStats<Config::kBlockM> const& stats_, RowIteration at, int pass)
      : p(p_),
        block(block_),
        stats(stats_),
        head(block.head_begin + at.head),
        pass_begin(pass * Config::kPassM),
        row_begin(at.m_block * Config::kBlockM + pass_begin),
        coord(SplitThread<Config>{}.thread) {}

  __device__ bool drops() const { return kFull && p.scores.dropout_p > 0.f; }

  // Turns scores into the probabilities by which the values are multiplied, in place. Returns the
  // factors of score_gradients: probabilities before dropout, times the softcap's derivative. They
  // are in fp32, which spares the conversion back that the 16 bits of dV's operand would need: a
  // tenth of all instructions at d 64.
  template <class Scores>
  __device__ auto probabilities(Scores& s_mma) {
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    if constexpr (kFull) {
      Tensor factors = make_fragment_like(s_mma);
      apply_score_mod_transposed(s_mma, s, factors, score_mod(), row_begin, block.key_begin, coord);
      exponentiate(s, kLog2e);
#pragma unroll
      for (int i = 0; i < size(s_mma); ++i) {
        factors(i) *= s_mma(i);
      }
      if (drops()) {
        keep.draw({p.scores, block.tile.batch, p.heads_q, head}, row_begin, block.key_begin, coord);
        keep.apply(s);
      }
      return factors;
    } else {
      exponentiate(s, p.scores.softmax_scale * kLog2e);
      Tensor factors = make_fragment_like(s_mma);
      copy(s_mma, factors);
      return factors;
    }
  }

  // Initial value of dP: -D in plain kernels, so that the products end in dP - D.
  template <class Gradient>
  __device__ void start_gradients(Gradient& dp_mma) const {
    clear(dp_mma);
    if constexpr (!kFull) {
      subtract_delta(dp_mma);
    }
  }

  // dP → dS / softmax_scale, in place. Under dropout both are (1 - dropout_p) times that.
  template <class Gradient, class Factors>
  __device__ void score_gradients(Gradient& dp_mma, Factors const& factors) const {
    if constexpr (kFull) {
      if (drops()) {
        Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
        keep.apply(dp);
      }
      subtract_delta(dp_mma);
    }
#pragma unroll
    for (int i = 0; i < size(dp_mma); ++i) {
      dp_mma(i) *= factors(i);
    }
  }

 private:
  __device__ int column(int c) const { return pass_begin + coord.col(c); }

  __device__ ScoreMod score_mod() const {
    return {p.scores.softmax_scale, p.scores.softcap, p.scores.alibi_slope(block.tile.batch, head),
            block.info.seqlen_k - block.info.seqlen_q};
  }

  template <class Gradient>
  __device__ void subtract_delta(Gradient& dp_mma) const {
    Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      auto const delta = *reinterpret_cast<float2 const*>(&stats.softmax_d[column(c)]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dp(r, c) -= delta.x;
        dp(r, c + 1) -= delta.y;
      }
    }
  }

  // exp2(score * scale_log2 - LSE); rows that do not exist or saw no key have LSE +inf.
  template <class Scores>
  __device__ void exponentiate(Scores& s, float scale_log2) const {
    if constexpr (kMasked) {
      apply_mask_transposed(s, block.mask, row_begin, block.key_begin, coord);
    }
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      auto const lse = *reinterpret_cast<float2 const*>(&stats.lse_log2[column(c)]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s(r, c) = exp2_fast(s(r, c) * scale_log2 - lse.x);
        s(r, c + 1) = exp2_fast(s(r, c + 1) * scale_log2 - lse.y);
      }
    }
  }
};

}  // namespace flash::sm80
