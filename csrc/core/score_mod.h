// What the full score level does to a score before the softmax. The plain level has none of this:
// there the scale folds into the softmax's exponent.
#pragma once

#include <cmath>

#include "core/softmax.h"
#include "params/common.h"

namespace flash {

// Absolute error below 1e-6, which tanh.approx (5e-4) is far from; both ends saturate to ±1.
FLASH_HD float tanh_exact(float x) {
  return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.f * kLog2e * x));
}

// The scores of one head.
struct ScoreMod {
  float softmax_scale;
  float softcap;      // 0: off
  float alibi_slope;  // 0: off
  int shift;          // seqlen_k - seqlen_q: the key on the diagonal of row i is i + shift

  FLASH_HD float cap(float score) const {
    return softcap * tanh_exact(score * reciprocal_fast(softcap));
  }

  // ALiBi (2108.12409): a penalty that grows with the distance from the diagonal.
  FLASH_HD float bias(int row, int key) const {
    int const distance = row + shift - key;
    return -alibi_slope * static_cast<float>(distance < 0 ? -distance : distance);
  }
};

}  // namespace flash
