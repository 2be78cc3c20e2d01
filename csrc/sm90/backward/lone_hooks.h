// Softcap or ALiBi alone, in fewer instructions than beside each other (hooked_tile.h).
#pragma once

#include "sm90/backward/score_hooks.h"

namespace flash::sm90 {

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
    return {product * scale_log2 - (at_row + first[r]), 1.f};
  }
};

// Of |product|, up to which a hook has tanh; nowhere if powers overflow or underflow.
struct TanhLimits {
  float near;    // NearTanhHook
  float middle;  // TanhHook

  __device__ explicit TanhLimits(ScoreMod const& mod) {
    constexpr float kNear = 0.125f, kMiddle = 0.75f;  // of |tanh|'s argument
    float const slope = fabsf(mod.softmax_scale * reciprocal_fast(mod.softcap));
    float const inverse = fabsf(mod.softcap * reciprocal_fast(mod.softmax_scale));
    bool const finite = slope < 1e3f;
    near = finite && inverse < 1e18f ? kNear * inverse : -1.f;
    middle = finite && inverse < 1e4f ? kMiddle * inverse : -1.f;
  }
};

// Scores within an eighth of the cap: tanh(x) / x and 1 - tanh(x)^2 are lines in x^2, within 6e-7
// of tanh and 3e-5 of the derivative. Minimax of those that are 1 at 0: under a cap so large that
// it does nothing, scores are what they are.
struct NearTanhHook {
  float log2[2];  // of the powers of product^2
  float slope[2];

  __device__ explicit NearTanhHook(ScoreMod const& mod) {
    float const slope_of_tanh = mod.softmax_scale * reciprocal_fast(mod.softcap);
    float const square = slope_of_tanh * slope_of_tanh;
    log2[0] = 0.9999999f * mod.softmax_scale * kLog2e;
    log2[1] = -0.33153321f * mod.softmax_scale * kLog2e * square;
    slope[0] = 1.f;
    slope[1] = -0.99143987f * square;
  }

  __device__ HookedScore operator()(float product, float lse, int, int) const {
    float const square = product * product;
    float const sum = log2[1] * square + log2[0];
    return {sum * product - lse, slope[1] * square + slope[0]};
  }
};

// Within three quarters: five powers, within 2e-7. tanh's square gives the derivative, its multiple
// the score.
struct TanhHook {
  static constexpr int kPowers = 5;
  float coefficient[kPowers];  // of the powers of product^2
  float cap_log2;

  __device__ explicit TanhHook(ScoreMod const& mod) : cap_log2(mod.softcap * kLog2e) {
    float const slope = mod.softmax_scale * reciprocal_fast(mod.softcap);
    float factor = slope;
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
    return {tanh * cap_log2 - lse, 1.f - tanh * tanh};
  }

 private:
  // tanh(x) / x in powers of x^2, minimax
  __device__ static constexpr float power(int i) {
    constexpr float powers[kPowers] = {0.99999723f, -0.33323076f, 0.13226091f, -0.04928044f,
                                       0.01231883f};
    return powers[i];
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
    return {(cap_log2 - lse) - 2.f * cap_log2 * fall, 4.f * (fall - fall * fall)};
  }
};

}  // namespace flash::sm90
