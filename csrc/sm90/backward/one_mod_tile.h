// Scores with a softcap alone or ALiBi alone, without code for any other score mods. Factors stay
// where the scores were: 64 rows at once have registers for that.
#pragma once

#include "sm90/backward/scores.h"

namespace flash::sm90::backward {

// Like ScoreTile, but an iteration has one body for masked row blocks and whole ones: only the
// score mod exists twice.
template <ScoreModKind kKind, class Config>
struct OneModTile : ScoreTile<false, Config> {
  static constexpr bool kCap = kKind == ScoreModKind::Cap;
  static_assert(kCap || kKind == ScoreModKind::Bias);
  using Base = ScoreTile<false, Config>;
  using CapLoop = typename Config::CapLoop;
  static constexpr bool kReadsAhead = kCap && CapLoop::kReadsAhead;
  static constexpr bool kScansAhead = kCap && CapLoop::kScansAhead;

  NearTanhMod const& near_tanh;
  bool masked;          // a limit cuts through the row block
  float largest = 0.f;  // the thread's largest |product|; only with kScansAhead

  __device__ OneModTile(BackwardArgs const& args, KeyBlock<Config> const& block,
                        RowIteration const& rows, int warpgroup, int thread)
      : Base(args, block, rows, warpgroup, thread),
        near_tanh(args.near_tanh),
        masked(rows.masked) {}
  __device__ OneModTile(BackwardArgs const& args, KeyBlock<Config> const& block, int head,
                        int m_block, int warpgroup, int thread)
      : Base(args, block, head, m_block, warpgroup, thread),
        near_tanh(args.near_tanh),
        masked(block.range.masked(m_block)) {}

  template <class Scores, class Words, class Lse>
  __device__ __forceinline__ void probabilities(Scores& s, Words& operand, Lse const& lse) const {
    if (masked) {
      apply_score_mod<true>(s, operand, lse);
    } else {
      apply_score_mod<false>(s, operand, lse);
    }
  }

  template <class Gradient, class Factors, class Words, class Delta>
  __device__ __forceinline__ void score_gradients(Gradient& dp, Factors const& factors,
                                                  Words const& /*operand*/,
                                                  Delta const& softmax_d) const {
    Base::multiply(dp, factors, softmax_d);
  }

 private:
  template <bool kMasked, class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_score_mod(Scores& s, Words& operand, Lse const& lse) const {
    ScoreMod const mod = Base::score_mod();
    auto const exponentiate = [&](auto const& mod) {
      this->template exponentiate_modified<kMasked>(s, operand, lse, mod);
    };
    if constexpr (kCap) {
      with_tanh(mod, near_tanh, kScansAhead ? largest : largest_of(s), exponentiate);
    } else {
      with_bias<kMasked>(mod, this->row_begin, this->key_begin, this->coord, exponentiate);
    }
  }
};

}  // namespace flash::sm90::backward
