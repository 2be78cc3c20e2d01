// What a CTA of the gradients' kernel has: a chunk of a head.
#pragma once

#include "linear/tilings.h"
#include "sm80/linear/weights.h"

namespace flash::sm80::linear {

using flash::linear::BackwardParams;

// kK, kV: columns of a tile of Q and K, and of V and dO. kTiled: K has several tiles.
template <class Element_, int kK_, int kV_, bool kTiled_>
struct GradientsConfig {
  using Element = Element_;
  static constexpr int kK = kK_, kV = kV_, kChunk = flash::linear::kGradientsChunk;
  static constexpr bool kTiled = kTiled_;
  static constexpr int kStrips = kChunk / 16, kThreads = 32 * kStrips;  // a warp has a strip
  static constexpr int kSquares = kStrips * (kStrips + 1) / 2;  // on the diagonal and below it
  static constexpr int kOffDiagonal = kSquares - kStrips;
  static constexpr int kResident = 1;  // CTAs on an SM, for which registers are left
};

constexpr int kSquare = 16 * 16;  // elements

// A square of a strip's rows against an earlier strip's columns, or its own.
__device__ inline int square_number(int strip, int other) {
  return strip * (strip + 1) / 2 + other;
}

// The same among those below the diagonal.
__device__ inline int pair_number(int strip, int other) { return strip * (strip - 1) / 2 + other; }

// Sums that the gates' gradient is made of. W = A ∘ dP: what each pair of tokens has in the loss.
template <class C>
struct GateSums {
  alignas(16) float columns[C::kOffDiagonal][16];  // of a square of W below the diagonal
  float rows[C::kChunk];                           // of W, over earlier strips
  float own[C::kChunk];      // of W's pairs in the token's strip that its gate is between
  float read[C::kChunk];     // of the token's part in the loss that its query reads from S0
  float reached[C::kChunk];  // of what its key adds to S'
  float kept[C::kStrips];    // of S0 ∘ dS', by warp

  // Sums of these, by sum_strips.
  float after[C::kChunk];          // of the token's columns of W, over all later strips
  float squares[C::kOffDiagonal];  // of W
  float read_of[C::kStrips];
  float reached_of[C::kStrips];
  float kept_of_all;
};

template <class C>
struct GradientsStorage {
  using Element = typename C::Element;
  alignas(16) Element q[C::kChunk * C::kK];
  alignas(16) Element k[C::kChunk * C::kK];
  alignas(16) Element v[C::kChunk * C::kV];
  alignas(16) Element dout[C::kChunk * C::kV];
  alignas(16) StateElement state[C::kK * C::kV];       // S0, before the chunk
  alignas(16) StateElement dstate[C::kK * C::kV];      // dS', after it
  alignas(16) Element weights[C::kSquares * kSquare];  // A
  alignas(16) Element dscores[C::kSquares * kSquare];  // of Q Kᵀ
  alignas(16) Cumulated cumulated[C::kChunk];
  alignas(16) float to_end[C::kChunk];  // of the token's strip
  GateSums<C> gate;
};

// Words of a square as the accumulators of two instructions have them, packed by as_a.
template <class Element>
__device__ uint32_t& word_of_square(Element* square, int word) {
  int const lane = threadIdx.x % 32;
  Element* const run = square + offset_in_tile<16>(word % 2 * 8 + lane / 4, word / 2);
  return *reinterpret_cast<uint32_t*>(run + lane % 4 * 2);
}

template <class Element>
__device__ void store_square(Element* square, float const (&left)[4], float const (&right)[4]) {
  uint32_t words[4];
  as_a<Element>(left, right, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word_of_square(square, i) = words[i];
  }
}

template <class Element>
__device__ void load_square(Element* square, float (&left)[4], float (&right)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 const near = unpack<Element>(word_of_square(square, half));
    float2 const far = unpack<Element>(word_of_square(square, 2 + half));
    left[2 * half] = near.x;
    left[2 * half + 1] = near.y;
    right[2 * half] = far.x;
    right[2 * half + 1] = far.y;
  }
}

// Stores what rounding to a dtype leaves of a square, in bf16.
template <class Element>
__device__ void store_rest(StateElement* square, float (&left)[4], float (&right)[4]) {
  uint32_t words[4];
  as_a<Element>(left, right, words);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 const near = unpack<Element>(words[half]), far = unpack<Element>(words[2 + half]);
    left[2 * half] -= near.x;
    left[2 * half + 1] -= near.y;
    right[2 * half] -= far.x;
    right[2 * half + 1] -= far.y;
  }
  store_square(square, left, right);
}

}  // namespace flash::sm80::linear
