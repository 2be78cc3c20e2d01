// What kernels with score mods do to a score before the softmax. Plain kernels only scale it, in
// the softmax's exponent.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/softmax.h"

namespace flash {

// Absolute error below 5e-7, which tanh.approx (5e-4) is far from; both ends saturate.
FLASH_HD float falling_logistic(float x_log2) { return reciprocal_fast(1.f + exp2_fast(x_log2)); }

// tanh within an absolute 5e-7: next to nothing beside 1, but as much as a small tanh itself.
FLASH_HD float tanh_absolute(float x) { return 1.f - 2.f * falling_logistic(2.f * kLog2e * x); }

// tanh(x) / x as a polynomial in x^2 that is 1 at 0: the minimax one for |x| <= kWidest
struct NearTanh {
  static constexpr float kWidest = 0.5f;

  // tanh(x) / x; square: x^2
  FLASH_HD static float over_x(float square) {
    constexpr float powers[5] = {1.f, -0.33333144f, 0.13325879f, -0.05304549f, 0.01724149f};
    float sum = powers[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      sum = sum * square + powers[i];
    }
    return sum;
  }
  FLASH_HD static float of(float x) { return over_x(x * x) * x; }
};

// tanh within 3e-7 of itself, in twice the instructions.
FLASH_HD float tanh_relative(float x) {
  float const wide = tanh_absolute(x);
  return fabsf(x) < NearTanh::kWidest ? NearTanh::of(x) : wide;
}

// The softcap as kernels get it. A cap above these limits does nothing, and one below makes all
// scores 0; intermediate results would overflow.
inline float softcap_in_range(double softcap) {
  return softcap == 0. ? 0.f : static_cast<float>(std::clamp(softcap, 1e-20, 1e30));
}

// The largest cap with which tanh_absolute's error does not show in a score.
constexpr float kUsualSoftcap = 256.f;

// The scores of one head.
struct ScoreMod {
  float softmax_scale;
  float softcap;      // 0: off
  float alibi_slope;  // 0: off
  int shift;          // seqlen_k - seqlen_q: the key on the diagonal of row i is i + shift

  // Whether the softmax's exponent applies the scale, which costs nothing there. ALiBi is then
  // divided by the scale, which must not be too small for that.
  FLASH_HD bool folds_scale() const {
    constexpr float kSmallest = 1e-20f;
    return softcap == 0.f && softmax_scale > (alibi_slope == 0.f ? 0.f : kSmallest);
  }

  // What is left for the softmax to multiply by.
  FLASH_HD float exponent_scale() const { return folds_scale() ? softmax_scale : 1.f; }

  // ALiBi's slope beside such scores.
  FLASH_HD float folded_slope() const {
    return folds_scale() ? alibi_slope * reciprocal_fast(softmax_scale) : alibi_slope;
  }

  FLASH_HD bool has_usual_cap() const { return softcap <= kUsualSoftcap; }

  // tanh's argument, divided by the product
  FLASH_HD float slope_of_tanh() const { return softmax_scale * reciprocal_fast(softcap); }

  // softcap * tanh(softmax_scale * product / softcap), of a product q·k
  FLASH_HD float cap(float product) const {
    return softcap * tanh_relative(slope_of_tanh() * product);
  }

  // The same with the cap as a factor of each case of tanh_relative: 14 instructions instead of 16.
  // ptxas allots registers differently around it: the paged sm80 kernel of d 64 spills 16 bytes,
  // with `cap` 64; Hopper's forward of d 256 spills 176, with `cap` 60.
  FLASH_HD float cap_by_case(float product) const {
    float const x = slope_of_tanh() * product;
    float const near = NearTanh::over_x(x * x) * (softcap * x);
    float const wide = softcap - 2.f * softcap * falling_logistic(2.f * kLog2e * x);
    return fabsf(x) < NearTanh::kWidest ? near : wide;
  }

  // The same with a usual cap.
  FLASH_HD float usual_cap(float product) const {
    float const scale_log2 = 2.f * kLog2e * slope_of_tanh();
    return softcap - 2.f * softcap * falling_logistic(scale_log2 * product);
  }

  // Before ALiBi
  FLASH_HD float scaled(float product) const {
    return softcap > 0.f ? cap(product) : softmax_scale * product;
  }

  // ALiBi (2108.12409): a penalty that grows with the distance from the diagonal.
  FLASH_HD float bias(int row, int key) const {
    return -alibi_slope * fabsf(static_cast<float>(row + shift - key));
  }

  // Scale, softcap and ALiBi, for kernels that compute one score after the other.
  FLASH_HD float score(float product, int row, int key) const {
    return scaled(product) + bias(row, key);
  }
};

// The sum of coefficient[i] * x^i.
template <int kPowers>
FLASH_HD float polynomial(float const (&coefficient)[kPowers], float x) {
  float sum = coefficient[kPowers - 1];
#pragma unroll
  for (int i = kPowers - 2; i >= 0; --i) {
    sum = sum * x + coefficient[i];
  }
  return sum;
}

// NearTanh for SmallCap, with a wider range: minimax for |x| <= kWidest, tanh within 4e-7.
struct SmallTanh {
  static constexpr float kWidest = 0.75f;
  static constexpr int kPowers = 5;

  FLASH_HD static constexpr float power(int i) {
    constexpr float powers[kPowers] = {1.f, -0.33328751f, 0.13259583f, -0.05003375f, 0.01289240f};
    return powers[i];
  }

  // The coefficients of factor * tanh(slope * x) / (slope * x), in powers of x^2. Returns the next
  // power's factor.
  FLASH_HD static float fill(float factor, float slope, float (&coefficient)[kPowers]) {
#pragma unroll
    for (int i = 0; i < kPowers; ++i) {
      coefficient[i] = factor * power(i);
      factor *= slope * slope;
    }
    return factor;
  }
};

// A usual cap where scores are well below it, as a polynomial. It needs no special functions, of
// which an SM evaluates one in the time of eight multiplications.
struct SmallCap {
  static constexpr int kPowers = SmallTanh::kPowers;
  float limit;                 // of |product|, up to which this holds
  float coefficient[kPowers];  // of the powers of product^2

  FLASH_HD explicit SmallCap(ScoreMod const& mod) {
    float const slope = mod.slope_of_tanh();
    float const factor = SmallTanh::fill(mod.softmax_scale, slope, coefficient);
    // Nowhere if powers of the slope overflow.
    bool const finite = fabsf(factor) < INFINITY;
    limit = finite ? SmallTanh::kWidest * reciprocal_fast(fabsf(slope)) : -1.f;
  }

  FLASH_HD float operator()(float product) const {
    return polynomial(coefficient, product * product) * product;
  }
};

}  // namespace flash
