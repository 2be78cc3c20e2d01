// Online softmax (Milakov & Gimelshein 2018; FlashAttention 2205.14135, algorithm 1) for the rows
// one thread holds. Exponents are base 2, so that scale and log2(e) fold into one FFMA per score.
#pragma once

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

// Rows are spread over several threads; this reduction leaves all of them with the result.
struct NoReduce {
  template <class Op>
  FLASH_HD float operator()(float x, Op) const {
    return x;
  }
};

struct Max {
  FLASH_HD float operator()(float a, float b) const { return a > b ? a : b; }
};
struct Sum {
  FLASH_HD float operator()(float a, float b) const { return a + b; }
};

// kSlack: `max` stays behind as long as that leaves exponentials below 2^kSlack, and `rescale` at
// 1, which a kernel can then leave out; 0: it is always the true one. Sums and outputs are fp32 and
// probabilities have floating point, so nothing is lost by numbers up to 2^kSlack instead of 1.
template <int kRows, int kSlack = 0>
struct OnlineSoftmax {
  float max[kRows];  // of the raw scores so far; the same in all threads of a row
  float sum[kRows];  // of this thread's exponentials, relative to max
  float scale_log2;  // softmax_scale * log2(e), > 0

  FLASH_HD explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
    for (int r = 0; r < kRows; ++r) {
      max[r] = -INFINITY;
      sum[r] = 0.f;
    }
  }

  // A row that has seen no key yet has max -inf; 0 stands in so that -inf - -inf never happens.
  FLASH_HD float offset(int r) const { return max[r] == -INFINITY ? 0.f : max[r] * scale_log2; }

  // Replaces scores (kRows, kCols) by exp2(scale_log2 * (score - max)) and returns in `rescale` the
  // factor each row's earlier output has to be multiplied by.
  template <int kCols, class Scores, class Reduce>
  FLASH_HD void step(Scores&& scores, float (&rescale)[kRows], Reduce reduce) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float row_max = max[r];
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        row_max = fmaxf(row_max, scores(r, c));
      }
      float const before = offset(r);
      row_max = reduce(row_max, Max{});
      bool const stay =
          kSlack > 0 && max[r] != -INFINITY && row_max * scale_log2 - before <= kSlack;
      max[r] = stay ? max[r] : row_max;
      float const now = offset(r);
      // The maximum only grows, except from the 0 that stands in for -inf: without the limit, a
      // first block of scores below -128 gives 0 * inf here.
      rescale[r] = exp2_fast(fminf(before - now, 0.f));
      float row_sum = 0.f;
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        float const p = exp2_fast(scores(r, c) * scale_log2 - now);
        scores(r, c) = p;
        row_sum += p;
      }
      sum[r] = sum[r] * rescale[r] + row_sum;
    }
  }

  struct Row {
    float out_scale;  // what the unnormalised output is multiplied by
    float lse;        // natural log; -inf for a row without keys
  };

  // Closes row r, once all its keys were seen. A sink logit joins the denominator (-inf: none).
  template <class Reduce>
  FLASH_HD Row finish(int r, float sink, Reduce reduce) {
    float const total = reduce(sum[r], Sum{});
    float const keys = max[r] == -INFINITY ? -INFINITY : max[r] * scale_log2;
    float const sink_log2 = sink * kLog2e;
    float const top = keys > sink_log2 ? keys : sink_log2;
    // No key, or nothing but NaN, which a maximum does not see and the sum does.
    if (top == -INFINITY) return {0.f, total == 0.f ? -INFINITY : total};
    float const weight = exp2_fast(keys - top);
    float const denominator = total * weight + exp2_fast(sink_log2 - top);
    return {weight / denominator, (top + log2f(denominator)) * kLn2};
  }
};

}  // namespace flash
