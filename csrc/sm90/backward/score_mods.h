// What kernels of the full level do to a product q·k of the transposed scores on its way to a
// probability.
#pragma once

#include "core/fragment_coord.h"
#include "core/score_mod.h"

namespace flash::sm90::backward {

struct ModifiedScore {
  float log2;   // of the probability
  float slope;  // the softcap's derivative
};

// What ALiBi takes off a thread's scores, in units of log2: every distance is the first one plus a
// constant. The operator gives its size; with a slope below 0 it is added.
struct TransposedBias {
  float slope_log2;
  float first;
  float sign;

  // first_row, first_key: of the thread's first score
  __device__ TransposedBias(ScoreMod const& mod, int first_row, int first_key)
      : slope_log2(mod.alibi_slope * kLog2e),
        first(slope_log2 * static_cast<float>(first_row + mod.shift - first_key)),
        sign(mod.alibi_slope < 0.f ? -1.f : 1.f) {}

  // The bias of score (r, c): (keys, queries).
  __device__ float operator()(int r, int c) const {
    return fabsf(first + slope_log2 * static_cast<float>(FragmentCoord<4>::col_offset(c) - 8 * r));
  }
};

// Each of these maps (product, lse, r, c) to a ModifiedScore, with lse in units of log2. A bias's
// sign stands outside of the whole score, where it costs nothing: LSE comes off in the same
// instruction.

struct ScaleMod {
  float scale_log2;

  __device__ ModifiedScore operator()(float product, float lse, int, int) const {
    return {product * scale_log2 - lse, 1.f};
  }
};

struct BiasMod {
  float signed_scale_log2;
  TransposedBias bias;

  __device__ ModifiedScore operator()(float product, float lse, int r, int c) const {
    return {bias.sign * (product * signed_scale_log2 - bias(r, c)) - lse, 1.f};
  }
};

// For scores well below the cap, and a slope that is not below 0.
struct SmallCapMod {
  SmallCap small;
  float inverse_cap;
  TransposedBias bias;

  __device__ ModifiedScore operator()(float product, float lse, int r, int c) const {
    float const capped = small(product), tanh = capped * inverse_cap;
    return {capped * kLog2e - bias(r, c) - lse, 1.f - tanh * tanh};
  }
};

struct CapMod {
  float double_scale_log2;  // over the cap
  float signed_cap_log2;
  TransposedBias bias;

  __device__ ModifiedScore operator()(float product, float lse, int r, int c) const {
    float const fall = falling_logistic(double_scale_log2 * product);
    float const capped = signed_cap_log2 - 2.f * signed_cap_log2 * fall;
    return {bias.sign * (capped - bias(r, c)) - lse, 4.f * (fall - fall * fall)};
  }
};

}  // namespace flash::sm90::backward
