// The weights of a chunk's own tokens, A = scale (Q Kᵀ ∘ e^{G_i − G_j}) for j <= i, in squares of a
// strip's 16 rows and 16 columns.
#pragma once

#include "core/dynamic_smem.h"
#include "linear/decay.h"
#include "sm80/linear/config.h"

namespace flash::sm80::linear {

using flash::linear::Cumulated;
using flash::linear::decay_between;

// Decays inside a strip of 16 tokens and between strips: what lies between tokens j of strip J and
// i of a later strip I is to_end(j) * between(J, I) * from_begin(i), none of them above 1.
struct StripDecays {
  Cumulated const* cumulated;  // of the chunk

  __device__ float to_end(int token) const {
    return decay_between(cumulated[token], cumulated[token | 15]);
  }
  __device__ float from_begin(int token) const {
    return decay_between(cumulated[token & ~15], cumulated[token]);
  }
  __device__ float between(int strip, int later) const {
    return decay_between(cumulated[strip * 16 + 15], cumulated[later * 16]);
  }
  __device__ float before(int strip) const {
    return decay_between({0.f, 0}, cumulated[strip * 16]);
  }
};

// Weights of an earlier strip, without the rows' own factors.
__device__ inline void scale_square(float (&left)[4], float (&right)[4], float between,
                                    float const* to_end, int lane) {
  float2 const near = *reinterpret_cast<float2 const*>(to_end + lane % 4 * 2);
  float2 const far = *reinterpret_cast<float2 const*>(to_end + lane % 4 * 2 + 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    left[i] *= between * (i % 2 ? near.y : near.x);
    right[i] *= between * (i % 2 ? far.y : far.x);
  }
}

// Weights of the strip's own tokens: with all factors; 0 above the diagonal, where the factor may
// be infinite.
__device__ inline void scale_diagonal(float (&left)[4], float (&right)[4], float scale,
                                      Cumulated const* strip, int lane) {
  int const row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Cumulated const near = strip[column + i], far = strip[column + 8 + i];
    Cumulated const first = strip[row], second = strip[row + 8];
    bool const exists = column + i <= row;
    left[i] = exists ? left[i] * (scale * decay_between(near, first)) : 0.f;
    left[2 + i] *= scale * decay_between(near, second);
    right[i] = 0.f;
    right[2 + i] = exists ? right[2 + i] * (scale * decay_between(far, second)) : 0.f;
  }
}

// Where K has several tiles: A of a chunk, kept as operands for the outputs. A CTA has 4 strips
// against 4 strips.
template <class Element_, int kChunk_>
struct WeightsConfig {
  using Element = Element_;
  static constexpr int kChunk = kChunk_, kK = 64, kStrips = kChunk / 16;
  static constexpr int kWarps = 4, kRows = 16 * kWarps, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kChunk / kRows;
  static constexpr int kPairs = kBlocks * (kBlocks + 1) / 2;  // on the diagonal and below it
};

template <class C>
struct WeightsStorage {
  alignas(16) typename C::Element q[2][C::kRows * C::kK];
  alignas(16) typename C::Element k[2][C::kRows * C::kK];
  alignas(16) Cumulated cumulated[C::kChunk];
  alignas(16) float to_end[C::kChunk];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    weights_kernel(__grid_constant__ ForwardParams const p) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<WeightsStorage<C>*>(dynamic_smem());
  int const head = blockIdx.x / C::kPairs % p.heads, slot = blockIdx.x / C::kPairs / p.heads;
  int row_block = 0, column_block = blockIdx.x % C::kPairs;
  while (column_block > row_block) {
    column_block -= ++row_block;
  }
  auto const chunk = flash::linear::chunk_of(p.sequences, slot);
  auto const& tokens = chunk.tokens;
  int const first_row = row_block * C::kRows, first_column = column_block * C::kRows;
  if (tokens.count <= first_row) {
    return;
  }
  auto const* q = rows_of<Element>(p.q, tokens, head / p.group, 0) + first_row * p.q.row_stride;
  auto const* k = rows_of<Element>(p.k, tokens, head / p.group, 0) + first_column * p.k.row_stride;
  auto const load = [&](int begin, int buffer) {
    if (begin < p.k_dim) {
      load_tile<C::kRows, C::kK, C::kThreads>(q + begin, p.q.row_stride, smem.q[buffer],
                                              tokens.count - first_row, p.k_dim - begin,
                                              p.aligned_k);
      load_tile<C::kRows, C::kK, C::kThreads>(k + begin, p.k.row_stride, smem.k[buffer],
                                              tokens.count - first_column, p.k_dim - begin,
                                              p.aligned_k);
    }
    cp_async_fence();
  };
  load(0, 0);
  if (threadIdx.x < 32) {
    flash::linear::cumulate<C::kChunk, Element>(p.gate, tokens, head, smem.cumulated);
  }
  __syncthreads();
  for (int t = threadIdx.x; t < C::kChunk; t += C::kThreads) {
    smem.to_end[t] = StripDecays{smem.cumulated}.to_end(t);
  }

  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[C::kRows / 8][4] = {};
  for (int begin = 0, buffer = 0; begin < p.k_dim; begin += C::kK, buffer ^= 1) {
    load(begin + C::kK, buffer ^ 1);
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t a[4], b[4];
      read_a<C::kK>(smem.q[buffer], warp * 16, d, a);
#pragma unroll
      for (int n = 0; n < C::kRows; n += 16) {
        read_b<C::kK>(smem.k[buffer], n, d, b);
        multiply<Element>(a, b, sums[n / 8], sums[n / 8 + 1]);
      }
    }
    __syncthreads();
  }

  int const strip = first_row / 16 + warp;
  uint4* const out = p.workspace.weights +
                     ((int64_t(slot) * p.heads + head) * C::kStrips + strip) * C::kStrips * 32;
#pragma unroll
  for (int n = 0; n < C::kRows / 16; ++n) {
    int const other = first_column / 16 + n;
    float (&left)[4] = sums[2 * n];
    float (&right)[4] = sums[2 * n + 1];
    if (other > strip) {
      continue;
    }
    if (other == strip) {
      scale_diagonal(left, right, p.scale, smem.cumulated + strip * 16, lane);
    } else {
      float const between = StripDecays{smem.cumulated}.between(other, strip) * p.scale;
      scale_square(left, right, between, smem.to_end + other * 16, lane);
    }
    uint32_t a[4];
    as_a<Element>(left, right, a);
    out[other * 32 + lane] = {a[0], a[1], a[2], a[3]};
  }
}

}  // namespace flash::sm80::linear
