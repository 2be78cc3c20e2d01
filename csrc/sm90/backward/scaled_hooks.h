// Hooks whose derivative comes in a unit, for factors of 16 bits (hooked_tile.h).
#pragma once

#include "sm90/backward/score_hooks.h"

namespace flash::sm90 {

// Probabilities and derivatives are at most 1, or little more where LSE is large and rounded: of
// their product, so many times as large, fp16 has 11 bits from 2^-26 to 16. With tanh times the
// root, the derivative takes no multiplication more.
constexpr float kTanhUnit = 64.f;
constexpr float kFactorUnit = kTanhUnit * kTanhUnit;

struct ScaleAlone {
  float scale_log2;

  __device__ HookedScore operator()(float product, float lse, int, int) const {
    return {product * scale_log2 - lse, kFactorUnit};
  }
};

// Another's, in units.
template <class Hook>
struct InUnits : Hook {
  __device__ HookedScore operator()(float product, float lse, int r, int c) const {
    HookedScore const x = Hook::operator()(product, lse, r, c);
    return {x.log2, x.slope * kFactorUnit};
  }
};

struct Bias : InUnits<BiasHook> {
  __device__ Bias(ScoreMod const& mod, TransposedBias const& bias)
      : InUnits{{bias.sign * mod.softmax_scale * kLog2e, bias}} {}
};

struct CapAndBias : InUnits<CapHook> {
  __device__ CapAndBias(ScoreMod const& mod, TransposedBias const& bias)
      : InUnits{{2.f * mod.softmax_scale * kLog2e * reciprocal_fast(mod.softcap),
                 bias.sign * mod.softcap * kLog2e, bias}} {}
};

// ALiBi where no key is right of the diagonal, and distances need no absolute values.
struct LeftBias {
  float scale_log2;
  float slope_log2;
  float first[2];  // of the thread's two keys

  // distance: of the tile's first row and key
  __device__ LeftBias(ScoreMod const& mod, int distance, FragmentCoord<4> coord)
      : scale_log2(mod.softmax_scale * kLog2e), slope_log2(mod.alibi_slope * kLog2e) {
    first[0] = slope_log2 * static_cast<float>(distance + coord.col(0) - coord.row(0));
    first[1] = first[0] - 8.f * slope_log2;
  }

  __device__ HookedScore operator()(float product, float lse, int r, int c) const {
    float const at_row = slope_log2 * static_cast<float>(FragmentCoord<4>::col_offset(c)) + lse;
    return {product * scale_log2 - (at_row + first[r]), kFactorUnit};
  }
};

// Of |product|, up to which so many powers have tanh, within 6e-8 and 2e-7; nowhere if they
// overflow or underflow.
struct TanhLimits {
  float few;   // 3
  float many;  // 5

  __device__ explicit TanhLimits(ScoreMod const& mod) {
    constexpr float kFew = 0.25f, kMany = 0.75f;  // of |tanh|'s argument
    float const slope = fabsf(mod.softmax_scale * reciprocal_fast(mod.softcap));
    float const inverse = fabsf(mod.softcap * reciprocal_fast(mod.softmax_scale));
    bool const finite = slope < 1e3f;
    few = finite && inverse < 1e7f ? kFew * inverse : -1.f;
    many = finite && inverse < 1e4f ? kMany * inverse : -1.f;
  }
};

// A softcap alone is tanh, whose square gives the derivative, and a multiple.
template <int kPowers>
struct TanhHook {
  static_assert(kPowers == 3 || kPowers == 5);
  float coefficient[kPowers];  // of the powers of product^2, in tanh's units
  float cap_log2;              // of such a unit

  __device__ explicit TanhHook(ScoreMod const& mod) : cap_log2(mod.softcap * kLog2e / kTanhUnit) {
    float const slope = mod.softmax_scale * reciprocal_fast(mod.softcap);
    float factor = slope * kTanhUnit;
#pragma unroll
    for (int i = 0; i < kPowers; ++i) {
      coefficient[i] = factor * power(i);
      factor *= slope * slope;
    }
  }

  __device__ HookedScore operator()(float product, float lse, int, int) const {
    float const square = product * product;
    float sum = coefficient[kPowers - 1];
#pragma unroll
    for (int i = kPowers - 2; i >= 0; --i) {
      sum = sum * square + coefficient[i];
    }
    float const tanh = sum * product;
    return {tanh * cap_log2 - lse, kFactorUnit - tanh * tanh};
  }

 private:
  // tanh(x) / x in powers of x^2: minimax up to TanhLimits' arguments
  __device__ static constexpr float power(int i) {
    constexpr float few[5] = {0.9999986f, -0.333157f, 0.12762232f};
    constexpr float many[5] = {0.99999723f, -0.33323076f, 0.13226091f, -0.04928044f, 0.01231883f};
    return kPowers == 3 ? few[i] : many[i];
  }
};

struct AnyTanhHook {
  float double_scale_log2;  // over the cap
  float cap_log2;

  __device__ explicit AnyTanhHook(ScoreMod const& mod)
      : double_scale_log2(2.f * mod.softmax_scale * kLog2e * reciprocal_fast(mod.softcap)),
        cap_log2(mod.softcap * kLog2e) {}

  __device__ HookedScore operator()(float product, float lse, int, int) const {
    float const fall = falling_logistic(double_scale_log2 * product);
    return {(cap_log2 - lse) - 2.f * cap_log2 * fall, 4.f * kFactorUnit * (fall - fall * fall)};
  }
};

}  // namespace flash::sm90
