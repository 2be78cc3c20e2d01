// What a chunk's tokens do to each other: the inverse T and the weights A of DeltaFactors, for
// every chunk and head at once, because none depends on a state.
#pragma once

#include "core/early_launch.h"
#include "sm80/linear/delta_inverse.h"

namespace flash::sm80::linear {

template <class Element_, int kK_>
struct FactorsConfig {
  using Element = Element_;
  static constexpr int kK = kK_, kWarps = kDeltaStrips, kThreads = 32 * kWarps;
};

template <class C>
struct FactorsStorage {
  PanelTile<C::kK, typename C::Element> q;
  PanelTile<C::kK, typename C::Element> k;
  alignas(16) Square keys[kDeltaSquares];     // beta K Kᵀ ∘ decays
  alignas(16) Square inverse[kDeltaSquares];  // without the last factor, beta
  ChunkDecays<kDeltaChunk> decays;
  alignas(16) float beta[kDeltaChunk];
  alignas(16) float of_q[kDeltaChunk];  // 1 / |q|, or 1
  alignas(16) float of_k[kDeltaChunk];

  // A thread has a row of q or of k.
  __device__ void set_norms(bool normalizes) {
    constexpr float kEpsilon = 1e-6f;
    for (int i = threadIdx.x; i < 2 * kDeltaChunk; i += C::kThreads) {
      int const token = i % kDeltaChunk;
      bool const is_q = i < kDeltaChunk;
      float factor = 1.f;
      if (normalizes) {
        float const squares = is_q ? q.squares(token) : k.squares(token);
        // 1000 would be right for zeros as well, but u times that may leave the range of fp16.
        factor = squares == 0.f ? 0.f : 1.f / sqrtf(squares + kEpsilon);
      }
      (is_q ? of_q : of_k)[token] = factor;
    }
  }
};

// A square of products becomes weights: times the decays between its tokens.
__device__ inline void weigh(ChunkDecays<kDeltaChunk> const& decays, int strip, int other,
                             float scale, float (&left)[4], float (&right)[4]) {
  int const lane = threadIdx.x % 32;
  if (strip == other) {
    scale_diagonal(left, right, scale, decays.cumulated + strip * 16, lane);
    return;
  }
  float const between = StripDecays{decays.cumulated}.between(other, strip) * scale;
  scale_square(left, right, between, decays.to_end + other * 16, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const begin = decays.from_begin[strip * 16 + lane / 4 + i / 2 * 8];
    left[i] *= begin;
    right[i] *= begin;
  }
}

__device__ inline void scale_both(float const* rows, float const* columns, float (&left)[4],
                                  float (&right)[4]) {
  int const row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    left[i] *= rows[row + i / 2 * 8] * columns[column + i % 2];
    right[i] *= rows[row + i / 2 * 8] * columns[column + i % 2 + 8];
  }
}

template <class C>
struct ChunkFactors {
  using Element = typename C::Element;

  FactorsStorage<C>& smem;
  float scale;
  DeltaFactors& out;

  // A's square, and that of the keys.
  __device__ void set_square(int number) const {
    int const strip = strip_of_square(number), other = number - square_of(strip, 0);
    int const lane = threadIdx.x % 32;
    float q_left[4] = {}, q_right[4] = {}, k_left[4] = {}, k_right[4] = {};
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t q[4], k[4], columns[4];
      smem.q.as_a(strip * 16, d, q);
      smem.k.as_a(strip * 16, d, k);
      smem.k.as_b(other * 16, d, columns);
      multiply<Element>(q, columns, q_left, q_right);
      multiply<Element>(k, columns, k_left, k_right);
    }
    weigh(smem.decays, strip, other, scale, q_left, q_right);
    scale_both(smem.of_q + strip * 16, smem.of_k + other * 16, q_left, q_right);
    uint32_t a[4];
    as_a<Element>(q_left, q_right, a);
    out.weights[number][lane] = {a[0], a[1], a[2], a[3]};
    weigh(smem.decays, strip, other, 1.f, k_left, k_right);
    scale_both(smem.of_k + strip * 16, smem.of_k + other * 16, k_left, k_right);
    float* const keys = smem.keys[number] + lane / 4 * kSquarePitch + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float const beta = smem.beta[strip * 16 + lane / 4 + i * 4];
      float* const row = keys + i * 4 * kSquarePitch;
      *reinterpret_cast<float2*>(row) = {beta * k_left[i], beta * k_left[i + 1]};
      *reinterpret_cast<float2*>(row + 8) = {beta * k_right[i], beta * k_right[i + 1]};
    }
  }

  // T's square, as the operand B of Rᵀ Tᵀ.
  __device__ void write_inverse(int number) const {
    int const lane = threadIdx.x % 32;
    float const* const beta =
        smem.beta + (number - square_of(strip_of_square(number), 0)) * 16 + lane % 4 * 2;
    uint32_t b[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float2 const pair = pair_of_b(smem.inverse[number], word);
      float const* const own = beta + word % 2 * 8;
      b[word] = pack<Element>(pair.x * own[0], pair.y * own[1]);
    }
    out.inverse[number][lane] = {b[0], b[1], b[2], b[3]};
  }

  __device__ void write_decays() const {
    for (int t = threadIdx.x; t < kDeltaChunk; t += C::kThreads) {
      out.reads_q[t] = smem.decays.before[t] * smem.of_q[t] * scale;
      out.reads_k[t] = smem.decays.before[t] * smem.of_k[t];
      out.enters[t] = smem.decays.left[t] * smem.of_k[t];
    }
    if (threadIdx.x == 0) {
      out.total = {smem.decays.total(), 0.f, 0.f, 0.f};
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    delta_factors_kernel(__grid_constant__ DeltaParams const params) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<FactorsStorage<C>*>(dynamic_smem());
  let_next_launch_start();
  ForwardParams const& p = params.forward;
  int const head = blockIdx.x % p.heads, slot = blockIdx.x / p.heads;
  auto const chunk = flash::linear::chunk_of(p.sequences, slot);
  if (!chunk.exists()) {
    return;
  }
  auto const& tokens = chunk.tokens;
  smem.q.template load<C::kThreads>(p, p.q, tokens, head / p.group);
  smem.k.template load<C::kThreads>(p, p.k, tokens, head / p.group);
  cp_async_fence();
  int const warp = threadIdx.x / 32;
  if (warp == 0) {
    smem.decays.set(flash::linear::log_decays<kDeltaChunk, Element>(p.gate, tokens, head));
  } else if (warp == 1) {
    // A gate's view serves beta as well; tokens that do not exist have 0.
    auto const beta = flash::linear::log_decays<kDeltaChunk, Element>(params.beta, tokens, head);
#pragma unroll
    for (int i = 0; i < beta.kOwn; ++i) {
      smem.beta[threadIdx.x % 32 * beta.kOwn + i] = beta.own[i];
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  smem.set_norms(params.normalizes);
  __syncthreads();
  ChunkFactors<C> const factors{smem, p.scale, params.factors[int64_t(slot) * p.heads + head]};
#pragma unroll 1
  for (int number = warp; number < kDeltaSquares; number += C::kWarps) {
    factors.set_square(number);
  }
  factors.write_decays();
  __syncthreads();
  int const diagonal = square_of(warp, warp);
  invert_diagonal(smem.keys[diagonal], smem.inverse[diagonal]);
  __syncthreads();
  invert_column(smem.keys, smem.inverse, warp);
  __syncthreads();
#pragma unroll 1
  for (int number = warp; number < kDeltaSquares; number += C::kWarps) {
    factors.write_inverse(number);
  }
}

}  // namespace flash::sm80::linear
