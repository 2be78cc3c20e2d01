// What kernels with score mods do to a product q·k of the transposed scores on its way to a
// probability.
#pragma once

#include "core/dropout.h"
#include "core/fragment_coord.h"
#include "core/score_mod.h"
#include "sm90/tensor_core.h"

namespace flash::sm90::backward {

// Which score mods a loop over row blocks has.
enum class ScoreModKind {
  Cap,   // a softcap alone
  Bias,  // ALiBi alone
  Drop,  // dropout alone, with a probability of a half at most
  Any,   // what the call has
};

__device__ inline ScoreModKind score_mod_kind(Scores const& scores) {
  bool const caps = scores.softcap > 0.f, biased = scores.alibi_slopes,
             drops = scores.dropout_p > 0;
  if (drops && scores.dropout_threshold > HalvesBelow::kLargest) {
    return ScoreModKind::Any;
  }
  if (caps + biased + drops != 1) {
    return ScoreModKind::Any;
  }
  return caps ? ScoreModKind::Cap : biased ? ScoreModKind::Bias : ScoreModKind::Drop;
}

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

// A softcap alone or ALiBi alone take fewer instructions than together: ALiBi where no key is right
// of the diagonal, so that distances need no absolute values.
struct LeftBias {
  float scale_log2;
  float slope_log2;
  float first[2];  // of the thread's two keys

  // distance: between the tile's first row and key
  __device__ LeftBias(ScoreMod const& mod, int distance, FragmentCoord<4> coord)
      : scale_log2(mod.softmax_scale * kLog2e), slope_log2(mod.alibi_slope * kLog2e) {
    first[0] = slope_log2 * static_cast<float>(distance + coord.col(0) - coord.row(0));
    first[1] = first[0] - 8.f * slope_log2;
  }

  __device__ ModifiedScore operator()(float product, float lse, int r, int c) const {
    float const at_row = slope_log2 * static_cast<float>(FragmentCoord<4>::col_offset(c)) + lse;
    return {product * scale_log2 - (at_row + first[r]), 1.f};
  }
};

// The largest |product| with which tanh's argument stays within `widest`. Negative if powers of the
// slope overflow. With a slope flatter than the inverse of `flattest`, whose powers underflow, the
// limit is where these powers are nothing beside 1.
FLASH_HD float tanh_limit(ScoreMod const& mod, float widest, float flattest) {
  float const slope = fabsf(mod.slope_of_tanh());
  float const inverse = fabsf(mod.softcap * reciprocal_fast(mod.softmax_scale));
  return slope < 1e3f ? widest * fminf(inverse, flattest) : -1.f;
}

// Scores within an eighth of the cap: tanh(x) / x and 1 - tanh(x)^2 are lines in x^2, within 6e-7
// of tanh and 3e-5 of the derivative. They are minimax among lines that are 1 at 0, so that a cap
// so large that it does nothing leaves scores as they are. The host computes them, or each
// iteration would.
struct NearTanhMod {
  float limit;    // largest |product| for which this holds
  float log2[2];  // of the powers of product^2
  float slope;    // of product^2

  FLASH_HD explicit NearTanhMod(ScoreMod const& mod) : limit(tanh_limit(mod, 0.125f, 1e18f)) {
    float const square = mod.slope_of_tanh() * mod.slope_of_tanh();
    log2[0] = 0.9999999f * mod.softmax_scale * kLog2e;
    log2[1] = -0.33153321f * mod.softmax_scale * kLog2e * square;
    slope = -0.99143987f * square;
  }

  __device__ ModifiedScore operator()(float product, float lse, int, int) const {
    float const square = product * product;
    float const sum = log2[1] * square + log2[0];
    return {sum * product - lse, slope * square + 1.f};
  }
};

// Scores within three quarters of the cap: five powers, within 2e-7. tanh's square gives the
// derivative, a multiple of tanh the score.
struct TanhMod {
  static constexpr int kPowers = SmallTanh::kPowers;
  float coefficient[kPowers];  // of the powers of product^2
  float cap_log2;

  __device__ static float limit(ScoreMod const& mod) {
    return tanh_limit(mod, SmallTanh::kWidest, 1e4f);
  }

  __device__ explicit TanhMod(ScoreMod const& mod) : cap_log2(mod.softcap * kLog2e) {
    float const slope = mod.slope_of_tanh();
    SmallTanh::fill(slope, slope, coefficient);
  }

  __device__ ModifiedScore operator()(float product, float lse, int, int) const {
    float const tanh = polynomial(coefficient, product * product) * product;
    return {tanh * cap_log2 - lse, 1.f - tanh * tanh};
  }
};

// Any score with a usual cap, the only caps that these kernels serve (launch/select.h).
struct AnyTanhMod {
  float double_scale_log2;  // over the cap
  float cap_log2;

  __device__ explicit AnyTanhMod(ScoreMod const& mod)
      : double_scale_log2(2.f * kLog2e * mod.slope_of_tanh()), cap_log2(mod.softcap * kLog2e) {}

  __device__ ModifiedScore operator()(float product, float lse, int, int) const {
    float const fall = falling_logistic(double_scale_log2 * product);
    return {(cap_log2 - lse) - 2.f * cap_log2 * fall, 4.f * (fall - fall * fall)};
  }
};

// Like largest_score, but compares three at once, by their bits.
template <class Scores>
__device__ __forceinline__ float largest_of(Scores const& s) {
  int tops[4] = {};
#pragma unroll
  for (int i = 0; i < cute::size(s); i += 4) {
    int& top = tops[i / 4 % 4];
    top = max_of_three(top, bits_ordered_from_zero(fmaxf(fabsf(s(i)), fabsf(s(i + 1)))),
                       bits_ordered_from_zero(fmaxf(fabsf(s(i + 2)), fabsf(s(i + 3)))));
  }
  return from_bits_ordered_from_zero(
      max_of_three(tops[0] > tops[1] ? tops[0] : tops[1], tops[2], tops[3]));
}

// Calls body(score mod) with the tanh of fewest powers that all of a warp's products allow.
// largest: the lane's largest |product|. A NaN is never the maximum: it passes through powers as
// through tanh.
template <class Body>
__device__ __forceinline__ void with_tanh(ScoreMod const& mod, NearTanhMod const& near_tanh,
                                          float largest, Body body) {
  auto const any_above = [&](float limit) { return __any_sync(0xffffffffu, !(largest <= limit)); };
  if (!any_above(near_tanh.limit)) {
    body(near_tanh);
  } else if (!any_above(TanhMod::limit(mod))) {
    body(TanhMod(mod));
  } else {
    body(AnyTanhMod(mod));
  }
}

// Calls body(score mod) for a tile that begins with this row and key.
template <bool kMasked, class Body>
__device__ __forceinline__ void with_bias(ScoreMod const& mod, int row_begin, int key_begin,
                                          FragmentCoord<4> coord, Body body) {
  int const distance = row_begin + mod.shift - key_begin;
  if (!kMasked && distance >= kWarpgroupRows - 1) {
    body(LeftBias(mod, distance, coord));
  } else {
    TransposedBias const bias(mod, row_begin + coord.col(0), key_begin + coord.row(0));
    body(BiasMod{bias.sign * mod.softmax_scale * kLog2e, bias});
  }
}

}  // namespace flash::sm90::backward
