// A = scale tril(Σ_k q k e^{G_i − G_j}) of a step's 16 tokens, with a vector of decays; in reverse
// its transpose.
#pragma once

#include "sm80/linear/vector_gates.h"

namespace flash::sm80::linear {

// Two numbers of bf16 have 16 bits of one, and its range.
using WideElement = cutlass::bfloat16_t;

// On tensor cores A is (Q∘e^G) (K∘e^−G)ᵀ with G from the step's begin, where no G is below this
// (log2): so far e^−G, and Q times e^G, are numbers of fp32 and bf16. K takes half of it along.
constexpr float kLeastSum = -100.f, kKeyShift = 50.f;

// A step's rows of Q and K, times their decays.
template <class C>
struct StepOperands {
  WideElement const* query[2];
  WideElement const* key[C::kKeyParts];

  __device__ void multiply_rows(int strip, float (&left)[4], float (&right)[4]) const {
    int const lane = thread_index_here() % 32;
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t rows[2][4], columns[C::kKeyParts][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        read_square<false, C::kK>(query[part], strip * 16, d, lanes_of_a(lane), rows[part]);
      }
#pragma unroll
      for (int part = 0; part < C::kKeyParts; ++part) {
        read_square<false, C::kK>(key[part], strip * 16, d, lanes_of_b(lane), columns[part]);
      }
      multiply<WideElement>(rows[1], columns[0], left, right);
      if constexpr (C::kKeyParts == 2) {
        multiply<WideElement>(rows[0], columns[1], left, right);
      }
      multiply<WideElement>(rows[0], columns[0], left, right);
    }
  }
};

// 0 above the diagonal, where sums may be infinite; transposed: below it.
template <bool kTransposed>
__device__ void mask_triangle(float (&left)[4], float (&right)[4]) {
  int const row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bool const exists = kTransposed ? column + i >= row : column + i <= row;
    left[i] = exists ? left[i] : 0.f;
    right[2 + i] = exists ? right[2 + i] : 0.f;
    (kTransposed ? left[2 + i] : right[i]) = 0.f;
  }
}

// A square's sums become a tile of 16 columns in memory.
template <class Element, bool kTransposed>
__device__ void store_weights(float (&left)[4], float (&right)[4], float scale, int lane,
                              Element* out) {
  mask_triangle<kTransposed>(left, right);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = lane / 4 + half * 8, column = lane % 4 * 2;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      float const* const x = run == 0 ? left : right;
      reinterpret_cast<uint32_t&>(out[offset_in_tile<16>(row, run) + column]) =
          pack<Element>(x[half * 2] * scale, x[half * 2 + 1] * scale);
    }
  }
}

// The same for any gates: an exponential for each pair of tokens and column of K, whose exponent is
// a difference of sums inside the step. q, k, g: as they came.
template <class C>
struct ExactWeights {
  using Element = typename C::Element;
  Element const* q;
  Element const* k;
  GateTile<C>& g;
  int strip;

  // A warp puts sums from the step's begin in the place of gates, row after row. A row of 16-bit
  // numbers is read before sums are written over it.
  __device__ void cumulate(bool fp32) const {
    constexpr int kOwn = C::kK < 64 ? 1 : C::kK / 64;
    int const lane = threadIdx.x % 32;
    float2 sums[kOwn] = {};
#pragma unroll 1
    for (int row = strip * 16; row < strip * 16 + 16; ++row) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (int const column = (i * 32 + lane) * 2; column < C::kK) {
          float2 const gates = gates_at<C>(g, fp32, row, column);
          sums[i].x += log2_of(gates.x);
          sums[i].y += log2_of(gates.y);
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (int const column = (i * 32 + lane) * 2; column < C::kK) {
          *reinterpret_cast<float2*>(&g[row * C::kK + column]) = sums[i];
        }
      }
    }
    __syncwarp();
  }

  // As multiply_rows. Only pairs on the diagonal and below it are right.
  __device__ void multiply_rows(float (&left)[4], float (&right)[4]) const {
    int const lane = threadIdx.x % 32;
    int const row = strip * 16 + lane / 4, column = strip * 16 + lane % 4 * 2;
#pragma unroll 1
    for (int d = 0; d < C::kK; ++d) {
      Token const first = token(q, row, d), second = token(q, row + 8, d);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Token const near = token(k, column + i, d), far = token(k, column + 8 + i, d);
        left[i] += weight(near, first);
        right[2 + i] += weight(far, second);
        if constexpr (C::kReverse) {
          right[i] += weight(far, first);
        } else {
          left[2 + i] += weight(near, second);
        }
      }
    }
  }

 private:
  struct Token {
    float x;  // of q or k
    float sum;
  };
  __device__ Token token(Element const* tile, int row, int d) const {
    int const at = offset_in_tile<C::kK>(row, d / kRunElements) + d % kRunElements;
    return {static_cast<float>(tile[at]), g[row * C::kK + d]};
  }
  __device__ static float weight(Token const& key, Token const& query) {
    float const span = C::kReverse ? key.sum - query.sum : query.sum - key.sum;
    return query.x * key.x * exp2_fast(fminf(span, 0.f));
  }
};

}  // namespace flash::sm80::linear
