// Scores with hooks, of 128 rows at once. A thread has 64 of them, whose factors of dS would be 64
// registers beside P and dP: here they are 16 bits each.
#pragma once

#include "params/scores.h"
#include "sm90/backward/scaled_hooks.h"
#include "sm90/backward/scores.h"

namespace flash::sm90 {

// Which hooks a loop over row blocks has.
enum class HookKind {
  Cap,   // a softcap alone
  Bias,  // ALiBi alone
  Drop,  // dropout alone
  Any,   // what the call has
};

__device__ inline HookKind hook_kind(Scores const& scores) {
  bool const caps = scores.softcap > 0.f, biased = scores.alibi_slopes,
             drops = scores.dropout_p > 0;
  if (caps + biased + drops != 1) {
    return HookKind::Any;
  }
  return caps ? HookKind::Cap : biased ? HookKind::Bias : HookKind::Drop;
}

// As ScoreTile, but for factors, and that a visit has one body for masked row blocks and whole
// ones: only the hooks' loops are there twice.
template <HookKind kKind, class Config>
struct HookedTile : ScoreTile<false, Config> {
  using Base = ScoreTile<false, Config>;
  using Element = typename Config::Element;
  using Factor = cutlass::half_t;

  bool masked;                            // a limit cuts through the row block
  uint32_t factors[Config::kBlockM / 4];  // pairs, times kFactorUnit

  __device__ HookedTile(BwdParams const& p, KeyBlock<Config> const& block, RowVisit const& rows,
                        int warpgroup, int thread)
      : Base(p, block, rows, warpgroup, thread), masked(rows.masked) {}

  // The probabilities that the values meet, in 16 bits, to `operand`.
  template <class Scores, class Words, class Lse>
  __device__ __forceinline__ void probabilities(Scores const& s, Words& operand, Lse const& lse) {
    if (masked) {
      apply_hooks<true>(s, operand, lse);
    } else {
      apply_hooks<false>(s, operand, lse);
    }
    if (drops()) {
      Base::drop(s, operand);
    }
  }

  // dP → dS / softmax_scale, in place. Under dropout both are (1 - dropout_p) times that.
  template <class Gradient, class Scores, class Delta>
  __device__ __forceinline__ void score_gradients(Gradient& dp_mma, Scores const& /*s*/,
                                                  Delta const& softmax_d) const {
    constexpr float kInverse = 1.f / kFactorUnit;
    Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
    if (drops()) {
      this->keep.apply(dp);
    }
    Base::for_each_pair([&](int r, int c) {
      float2 const delta = softmax_d(c), factor = factors_of(dp.layout()(r, c) / 2);
      dp(r, c) = (dp(r, c) * kInverse - delta.x * kInverse) * factor.x;
      dp(r, c + 1) = (dp(r, c + 1) * kInverse - delta.y * kInverse) * factor.y;
    });
  }

 private:
  __device__ bool drops() const {
    return kKind == HookKind::Any ? Base::drops() : kKind == HookKind::Drop;
  }

  __device__ float2 factors_of(int word) const {
    cutlass::NumericArrayConverter<float, Factor, 2> const converter;
    auto const pair = converter(reinterpret_cast<cutlass::Array<Factor, 2> const&>(factors[word]));
    return {pair[0], pair[1]};
  }

  template <bool kMasked, class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_hooks(Scores const& s, Words& operand, Lse const& lse) {
    ScoreMod const mod = Base::score_mod();
    bool const caps = kKind == HookKind::Any ? mod.softcap > 0.f : kKind == HookKind::Cap;
    bool const biased = kKind == HookKind::Any ? mod.alibi_slope != 0.f : kKind == HookKind::Bias;
    if (caps && biased) {
      exponentiate<kMasked>(s, operand, lse, CapAndBias(mod, bias(mod)));
    } else if (caps) {
      apply_cap<kMasked>(s, operand, lse, mod);
    } else if (biased) {
      apply_bias<kMasked>(s, operand, lse, mod);
    } else {
      exponentiate<kMasked>(s, operand, lse, ScaleAlone{mod.softmax_scale * kLog2e});
    }
  }

  // With the fewest powers that all of a warp's scores allow.
  template <bool kMasked, class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_cap(Scores const& s, Words& operand, Lse const& lse,
                                            ScoreMod const& mod) {
    TanhLimits const limits(mod);
    float const top = largest_score(s);
    if (!any_above(top, limits.few)) {
      exponentiate<kMasked>(s, operand, lse, TanhHook<3>(mod));
    } else if (!any_above(top, limits.many)) {
      exponentiate<kMasked>(s, operand, lse, TanhHook<5>(mod));
    } else {
      exponentiate<kMasked>(s, operand, lse, AnyTanhHook(mod));
    }
  }

  // Of any lane of the warp. A maximum is never NaN: one goes through the powers as through tanh.
  __device__ static bool any_above(float top, float limit) {
    return __any_sync(0xffffffffu, !(top <= limit));
  }

  template <bool kMasked, class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_bias(Scores const& s, Words& operand, Lse const& lse,
                                             ScoreMod const& mod) {
    int const distance = this->row_begin + mod.shift - this->key_begin;  // of the first row and key
    if (!kMasked && distance >= kWarpgroupRows - 1) {
      exponentiate<kMasked>(s, operand, lse, LeftBias(mod, distance, this->coord));
    } else {
      exponentiate<kMasked>(s, operand, lse, Bias(mod, bias(mod)));
    }
  }

  __device__ TransposedBias bias(ScoreMod const& mod) const {
    return {mod, this->row_begin + this->coord.col(0), this->key_begin + this->coord.row(0)};
  }

  template <bool kMasked, class Scores, class Words, class Lse, class Hook>
  __device__ __forceinline__ void exponentiate(Scores const& s_mma, Words& operand,
                                               Lse const& lse_log2, Hook const& hook) {
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    Base::for_each_pair([&](int r, int c) {
      float2 const lse = lse_log2(c);
      HookedScore const a = hook(s(r, c), Base::template seen<kMasked>(lse.x, r, c), r, c);
      HookedScore const b =
          hook(s(r, c + 1), Base::template seen<kMasked>(lse.y, r, c + 1), r, c + 1);
      float const pa = exp2_fast(a.log2), pb = exp2_fast(b.log2);
      int const word = s.layout()(r, c) / 2;
      operand.data()[word] = pack_pair<Element>(pa, pb);
      factors[word] = pack_pair<Factor>(pa * a.slope, pb * b.slope);
    });
  }
};

}  // namespace flash::sm90
