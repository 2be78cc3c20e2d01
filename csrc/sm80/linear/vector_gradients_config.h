// How the gradients dQ and dK with a vector of decays are divided, and what a CTA keeps.
#pragma once

#include "sm80/linear/vector_weights.h"

namespace flash::sm80::linear {

using flash::linear::VectorGradientsParams;

// A warp has 16 rows of K of the state, and half of the tile's columns of V.
template <class Element_, int kTiling, flash::linear::Order kOrder>
struct VectorGradientsConfig {
  using Element = Element_;
  static constexpr flash::linear::VectorGradientsTiling tiling =
      flash::linear::kVectorGradientsTilings[kTiling];
  static constexpr bool kReverse = kOrder == flash::linear::Order::Reverse;
  static constexpr int kChunk = 32, kStrips = kChunk / 16;
  static constexpr int kK = tiling.k_tile, kV = tiling.v_tile, kHeads = tiling.heads;
  static constexpr int kWarpsV = 2, kWarpsK = kK / 16, kRows = 16;
  static constexpr int kOfWarp = kV / kWarpsV, kBlocks = kOfWarp / 16;
  static constexpr int kWarps = kWarpsV * kWarpsK * kHeads, kThreads = 32 * kWarps;
  static constexpr int kResident = tiling.resident;
  // Two threads share a column of K of a step: each has every other token.
  static constexpr int kOwn = 8;
  static_assert(2 * kHeads * kStrips * kK == kThreads);
  static constexpr int kPadded = kK + 8;  // a row of sums, so that eight are in different banks
};

template <class C>
struct VectorGradientsStorage {
  using Element = typename C::Element;
  template <class T>
  using Tiles = T[C::kHeads][C::kChunk * C::kK];

  // As they come: what enters the state and reads it, with gates, and what dg takes. The next
  // chunk's arrive while this one's are in use.
  struct Keys {
    alignas(16) Tiles<Element> k, own;
    alignas(16) Tiles<float> g;
  };
  Keys keys[2];
  alignas(16) Element v[C::kHeads][C::kChunk * C::kV];
  alignas(16) Element reading[C::kHeads][C::kChunk * C::kV];
  // k times its decays: the nearest numbers, and what is missing.
  alignas(16) Tiles<Element> entering[2];
  // What the states give to the gradient, by warp along V, before decays.
  alignas(16) float sums[C::kHeads][C::kWarpsV][C::kChunk][C::kPadded];
  // For each step: products of what reads and what enters, the state's factors, Σ_v S∘dS.
  alignas(16) float pairs[C::kHeads][C::kStrips][16][16];
  alignas(16) float factors[C::kHeads][C::kStrips][C::kK];
  alignas(16) float kept[C::kHeads][C::kWarpsV][C::kStrips][C::kK];
};

// What a thread has of a step: a column of K, and every other token, the even or the odd ones.
template <class C>
struct OwnColumn {
  static constexpr int kAcross = 16;  // columns of a warp

  int column, strip, head;  // head: of the CTA
  bool odd;

  __device__ OwnColumn() {
    int number = thread_index_here();
    odd = number & kAcross;
    column = number / (2 * kAcross) % (C::kK / kAcross) * kAcross + number % kAcross;
    number /= 2 * C::kK;
    strip = number % C::kStrips;
    head = C::kHeads == 1 ? 0 : number / C::kStrips;
  }
  __device__ bool exists(int heads) const { return C::kHeads == 1 || head < heads; }
  // The thread's token n, of the step's, and its row in the chunk.
  __device__ int token(int n) const { return 2 * n + odd; }
  __device__ int row(int token) const { return strip * 16 + token; }
  // Where the step's token t, or the thread's token n, is in a tile: a constant and an XOR with
  // one from the first.
  __device__ int at(int t) const { return t * C::kK + (offset_of(strip * 16) ^ xor_of(t)); }
  __device__ int at_own(int n) const {
    return 2 * n * C::kK + (offset_of(strip * 16 + odd) ^ xor_of(2 * n));
  }
  // A number of the thread's token n, of all tokens' in registers.
  __device__ float pick(float const (&all)[16], int n) const {
    return odd ? all[2 * n + 1] : all[2 * n];
  }
  // The number that the other thread of a column has in its place.
  __device__ static float of_other(float x) { return __shfl_xor_sync(0xffffffffu, x, kAcross); }

 private:
  __device__ int offset_of(int row) const {
    return offset_in_tile<C::kK>(row, column / kRunElements) + column % kRunElements;
  }
  __device__ static int xor_of(int row) { return offset_in_tile<C::kK>(row, 0) - row * C::kK; }
};

// Sums of log2 decays of a column from the step's begin: they do not grow.
template <class C>
struct ColumnSums {
  float until[16];

  __device__ ColumnSums(GateTile<C> const& tile, bool fp32, OwnColumn<C> const& own) {
    using Element = typename C::Element;
    float const* const first = tile + own.row(0) * C::kK;
    if (fp32) {
#pragma unroll
      for (int t = 0; t < 16; ++t) {
        until[t] = first[t * C::kK + own.column];
      }
    } else {
#pragma unroll
      for (int t = 0; t < 16; ++t) {
        auto const* const row = reinterpret_cast<Element const*>(first + t * C::kK);
        until[t] = static_cast<float>(row[own.column]);
      }
    }
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      sum += log2_of(until[t]);
      until[t] = sum;
    }
  }
  __device__ float all() const { return until[15]; }
  // The factor of what reads the state, and of what enters it.
  __device__ float reading(float until_own) const {
    return exp2_fast(C::kReverse ? all() - until_own : until_own);
  }
  __device__ float entering(float until_own) const {
    return exp2_fast(C::kReverse ? until_own : all() - until_own);
  }
};

}  // namespace flash::sm80::linear
