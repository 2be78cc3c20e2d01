// Online softmax (Milakov & Gimelshein 2018; FlashAttention 2205.14135, algorithm 1) for the rows
// that a thread holds. Exponents are base 2, so that scale and log2(e) are one FFMA per score.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "params/common.h"

namespace flash {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

FLASH_HD float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// 1 / x to one unit in the last place. A division that is right to the last bit takes ten times as
// many instructions, and a call for operands that are out of range.
FLASH_HD float reciprocal_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// Absolute error below 2^-22.
FLASH_HD float log2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}

// 2^(x - top) for x <= top; both may be infinite.
FLASH_HD float power_below(float x, float top) { return x == top ? 1.f : exp2_fast(x - top); }

// x's bits. As ints, those of non-negative floats have the floats' order; those of negative ones
// come below, in no useful order.
FLASH_HD int bits_ordered_from_zero(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  return std::bit_cast<int>(x);
#endif
}

FLASH_HD float from_bits_ordered_from_zero(int bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// One instruction from sm_90 on; there is none for floats.
FLASH_HD int max_of_three(int a, int b, int c) {
#if defined(__CUDA_ARCH__)
  return __vimax3_s32(a, b, c);
#else
  return std::max(std::max(a, b), c);
#endif
}

// A reduction over the threads that share a row leaves all of them with the result. This one is for
// rows that one thread holds alone.
struct NoReduce {
  template <class Op>
  FLASH_HD float operator()(float x, Op) const {
    return x;
  }
};

struct Max {
  FLASH_HD float operator()(float a, float b) const { return fmaxf(a, b); }  // one instruction
};
struct Sum {
  FLASH_HD float operator()(float a, float b) const { return a + b; }
};

// A number per row that all of the row's scores in a block lack. It is added to the row's maximum,
// instead of to each score.
template <int kRows>
struct RowOffsets {
  float value[kRows];

  FLASH_HD float add(int r, float lacking) const { return lacking + value[r]; }
  FLASH_HD float take_away(int r, float whole) const { return whole - value[r]; }
};

// For kernels that keep no largest logits.
struct NoTops {
  FLASH_HD void operator()(int /*r*/, float /*top*/) const {}
};

// The largest score of each row so far, among those that this thread has. OnlineSoftmax's check
// finds those of a block without further instructions.
template <int kRows>
struct KeptTops {
  float top[kRows];

  FLASH_HD KeptTops() {
    for (float& x : top) {
      x = -INFINITY;
    }
  }

  FLASH_HD void operator()(int r, float x) { top[r] = fmaxf(top[r], x); }
};

struct NoOffsets {
  FLASH_HD float add(int /*r*/, float x) const { return x; }
  FLASH_HD float take_away(int /*r*/, float x) const { return x; }
};

template <int kRows>
struct OnlineSoftmax {
  float max[kRows];  // of the raw scores so far, or up to slack() below; in all threads of a row
  float sum[kRows];  // of this thread's exponentials, relative to max
  float scale_log2;  // softmax_scale * log2(e), > 0

  FLASH_HD explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
    for (int r = 0; r < kRows; ++r) {
      max[r] = no_key();
      sum[r] = 0.f;
    }
  }

  // The maximum of a row that has seen no key. It is finite, and so is its product with scale_log2,
  // so that the loop over keys needs no case for it: the exponential of a score of -inf is then 0.
  FLASH_HD float no_key() const {
    float const divisor = fmaxf(scale_log2, 1.f);
    // For four rows the division is exact, which makes it a call: ptxas allots the registers of the
    // sm80 tiles of 128 rows anew around it. Without the call, d 128 spills 144 bytes and loses 8%
    // on an H200.
    return kRows < 4 ? -3e38f * reciprocal_fast(divisor) : -3e38f / divisor;
  }

  // If every growth of a row's maximum rescaled the output, most blocks would. Exponents of up to 8
  // lose nothing in fp32, bf16 or fp16, and a maximum that stays until they are exceeded hardly
  // ever has to move after the first block.
  static constexpr float kSlack = 8.f;

  // Partial maxima and sums per row, which its columns use alternately: four chains in all. In a
  // chain every instruction waits for the result of the last, and with two warps to a scheduler
  // nothing else fills the time.
  static constexpr int kChains = kRows < 4 ? 2 : 1;

  // Whether one of these scores (kRows, kCols) may have to move a maximum. This takes half the
  // instructions of a maximum and no shuffle, so a loop over several KV blocks checks it first. It
  // is always true for rows whose maximum is negative or that have seen no key.
  template <int kCols, class Scores, class Offsets = NoOffsets>
  FLASH_HD bool may_move(Scores&& scores, Offsets const& offsets = {}) const {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      moves = may_move_row<kCols>(r, scores, slack(), offsets) || moves;
    }
    return moves;
  }

  // The same, and keeps each row's largest score, unless a maximum may move: then `raise` has to.
  template <int kCols, class Scores>
  FLASH_HD bool may_move(Scores&& scores, KeptTops<kRows>& kept) const {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      moves = may_move_row<kCols>(r, scores, slack(), kept) || moves;
    }
    return moves;
  }

  // kSlack in units of raw scores.
  FLASH_HD float slack() const { return kSlack * reciprocal_fast(scale_log2); }

  // The same for one row. slack: slack(), passed because it takes a reciprocal.
  template <int kCols, class Scores, class Offsets = NoOffsets>
  FLASH_HD bool may_move_row(int r, Scores&& scores, float slack,
                             Offsets const& offsets = {}) const {
    int const limit = bits_ordered_from_zero(offsets.take_away(r, max[r]) + slack);
    // 0 is above a negative limit.
    return top_bits<kCols>(r, scores, limit) > limit;
  }

  template <int kCols, class Scores>
  FLASH_HD bool may_move_row(int r, Scores&& scores, float slack, KeptTops<kRows>& kept) const {
    int const limit = bits_ordered_from_zero(max[r] + slack);
    int const top = top_bits<kCols>(r, scores, bits_ordered_from_zero(kept.top[r]));
    // At 0 it may not be the largest one, because negative scores are in no order.
    bool const stays = top > 0 && top <= limit;
    kept.top[r] = stays ? from_bits_ordered_from_zero(top) : kept.top[r];
    return !stays;
  }

  // The largest of 0, `least` and the scores of a row, as bits_ordered_from_zero has them.
  template <int kCols, class Scores>
  FLASH_HD static int top_bits(int r, Scores&& scores, int least) {
    static_assert(kCols % 4 == 0);
    int tops[2] = {0, least};
#pragma unroll
    for (int c = 0; c < kCols; c += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tops[i] = max_of_three(tops[i], bits_ordered_from_zero(scores(r, c + 2 * i)),
                               bits_ordered_from_zero(scores(r, c + 2 * i + 1)));
      }
    }
    return std::max(tops[0], tops[1]);
  }

  // Includes scores (kRows, kCols) in the maxima. Returns whether a maximum moved, and in `factor`
  // what each row's sum and earlier output then have to be multiplied by. tops(r, x) gets the
  // largest score of each row in this block, or the row's maximum if that is larger.
  template <int kCols, class Scores, class Reduce, class Offsets = NoOffsets, class Tops = NoTops>
  FLASH_HD bool raise(Scores&& scores, float (&factor)[kRows], Reduce reduce,
                      Offsets const& offsets = {}, Tops&& tops = {}) {
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      moved |= raise_row<kCols>(r, scores, factor[r], reduce, offsets, tops);
    }
    return moved;
  }

  // The same for one row.
  template <int kCols, class Scores, class Reduce, class Offsets = NoOffsets, class Tops = NoTops>
  FLASH_HD bool raise_row(int r, Scores&& scores, float& factor, Reduce reduce,
                          Offsets const& offsets = {}, Tops&& tops = {}) {
    float chains[kChains];
#pragma unroll
    for (float& top : chains) {
      top = offsets.take_away(r, max[r]);
    }
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      chains[c % kChains] = fmaxf(chains[c % kChains], scores(r, c));
    }
    float const top = reduce(offsets.add(r, fmaxf(chains[0], chains[kChains - 1])), Max{});
    tops(r, top);
    return raise_to(r, top, factor);
  }

  // The largest of these scores of a row, of this thread.
  template <int kCols, class Scores>
  FLASH_HD static float largest(int r, Scores&& scores) {
    float chains[kChains];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      chains[c % kChains] = c < kChains ? scores(r, c) : fmaxf(chains[c % kChains], scores(r, c));
    }
    return fmaxf(chains[0], chains[kChains - 1]);
  }

  // Moves a row's maximum to `top`, if that is more than kSlack above it. Returns whether it moved,
  // and in `factor` what the row's sum and earlier output then have to be multiplied by.
  FLASH_HD bool raise_to(int r, float top, float& factor) {
    float const growth = (top - max[r]) * scale_log2;
    bool const moves = growth > kSlack;
    factor = moves ? exp2_fast(-growth) : 1.f;
    max[r] = moves ? top : max[r];
    return moves;
  }

  FLASH_HD void rescale(float const (&factor)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] *= factor[r];
    }
  }

  // Replaces scores (kRows, kCols) by exp2(scale_log2 * (score - max)).
  template <int kCols, class Scores, class Offsets = NoOffsets>
  FLASH_HD void exponentials(Scores&& scores, Offsets const& offsets = {}) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      exponentials_of_row<kCols>(r, scores, offsets);
    }
  }

  // The same for one of the rows.
  template <int kCols, class Scores, class Offsets = NoOffsets>
  FLASH_HD void exponentials_of_row(int r, Scores&& scores, Offsets const& offsets = {}) {
    float const offset = offsets.take_away(r, max[r]) * scale_log2;
    // Kept apart from sum[r]: added to it one by one, the exponentials of 64k keys would lose 3e-4.
    float sums[kChains] = {};
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      float const p = exp2_fast(scores(r, c) * scale_log2 - offset);
      scores(r, c) = p;
      sums[c % kChains] = c < kChains ? p : sums[c % kChains] + p;
    }
    sum[r] += kChains > 1 ? sums[0] + sums[kChains - 1] : sums[0];
  }

  // Keeps the compiler from computing anything that depends on the row's maximum before this.
  FLASH_HD void hold_row(int r) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(max[r]));
#endif
  }

  // Called before a branch in which exponentials may change. If the compiler moved the sums past
  // the branch, they would keep the old exponentials alive beside the new ones, and each would be
  // copied whether or not the branch is taken.
  FLASH_HD void keep_sums_here() {
#if defined(__CUDA_ARCH__)
    for (float& s : sum) {
      asm volatile("" : "+f"(s));
    }
#endif
  }

  // A whole step, for outputs small enough to be rescaled each time.
  template <int kCols, class Scores, class Reduce>
  FLASH_HD void step(Scores&& scores, float (&factor)[kRows], Reduce reduce) {
    raise<kCols>(scores, factor, reduce);
    rescale(factor);
    exponentials<kCols>(scores);
  }

  FLASH_HD bool saw_key(int r) const { return max[r] > no_key(); }

  struct Row {
    float out_scale;  // what the unnormalised output is multiplied by
    float lse;        // natural log; -inf for a row without keys
  };

  // Closes row r after all its keys. A sink logit joins the denominator (-inf: there is none; a
  // logit of +inf, also one that overflows in units of log2, takes all of it).
  template <class Reduce>
  FLASH_HD Row finish(int r, float sink, Reduce reduce) {
    float const total = reduce(sum[r], Sum{});
    float const keys = max[r] <= no_key() ? -INFINITY : max[r] * scale_log2;
    float const sink_log2 = sink * kLog2e;
    float const top = keys > sink_log2 ? keys : sink_log2;
    // The row has no key, or nothing but NaN, which a maximum does not see and the sum does. This
    // is a selection, not a branch, because rows are finished side by side.
    bool const empty = top == -INFINITY;
    float const weight = power_below(keys, top);
    float const denominator = total * weight + power_below(sink_log2, top);
    // For a sink alone the LSE is the sink: its gradient depends on their difference.
    float const above = keys > sink_log2 ? max[r] * (scale_log2 * kLn2) : sink;
    float const lse = above + log2_fast(denominator) * kLn2;
    return {empty ? 0.f : weight * reciprocal_fast(denominator), !empty         ? lse
                                                                 : total == 0.f ? -INFINITY
                                                                                : total};
  }
};

}  // namespace flash
