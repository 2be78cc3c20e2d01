// What the full score level does to a score before the softmax. The plain level has none of this:
// there the scale folds into the softmax's exponent.
#pragma once

#include <cmath>

#include "core/softmax.h"
#include "params/common.h"

namespace flash {

// Absolute error below 5e-7, which tanh.approx (5e-4) is far from; both ends saturate.
FLASH_HD float falling_logistic(float x_log2) { return reciprocal_fast(1.f + exp2_fast(x_log2)); }

FLASH_HD float tanh_exact(float x) { return 1.f - 2.f * falling_logistic(2.f * kLog2e * x); }

// The scores of one head.
struct ScoreMod {
  float softmax_scale;
  float softcap;      // 0: off
  float alibi_slope;  // 0: off
  int shift;          // seqlen_k - seqlen_q: the key on the diagonal of row i is i + shift

  // Whether the scale is left to the softmax's exponent, which applies one for nothing. ALiBi is
  // then divided by it, for which it must not be next to nothing.
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

  // softcap * tanh(softmax_scale * product / softcap), of a product q·k
  FLASH_HD float cap(float product) const {
    float const scale_log2 = 2.f * kLog2e * softmax_scale * reciprocal_fast(softcap);
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
};

// The same cap where scores are well below it, as a polynomial without special functions, of which
// an SM evaluates an eighth of its multiplications.
struct SmallCap {
  float limit;           // of |product|, up to which this holds
  float coefficient[5];  // of the powers of product^2

  FLASH_HD explicit SmallCap(ScoreMod const& mod) {
    // tanh(x) / x in powers of x^2: minimax for |x| <= kWidest, absolute error of tanh(x) 2e-7
    constexpr float kWidest = 0.75f;
    constexpr float powers[5] = {0.99999723f, -0.33323076f, 0.13226091f, -0.04928044f, 0.01231883f};
    float const slope = mod.softmax_scale * reciprocal_fast(mod.softcap);
    float factor = mod.softmax_scale;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      coefficient[i] = factor * powers[i];
      factor *= slope * slope;
    }
    // Nowhere if powers of the slope overflow.
    bool const finite = fabsf(factor) < INFINITY;
    limit = finite ? kWidest * reciprocal_fast(fabsf(slope)) : -1.f;
  }

  FLASH_HD float operator()(float product) const {
    float const square = product * product;
    float sum = coefficient[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      sum = sum * square + coefficient[i];
    }
    return sum * product;
  }
};

}  // namespace flash
