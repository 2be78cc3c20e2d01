// Codes of 8 bits (e4m3) as operands of the products. They become fp16, which has all their
// numbers, on their way from shared memory to registers. 16-bit tiles' layouts and ldmatrix serve
// them, with two codes in the place of an element. That permutes columns: a lane gets four
// neighbours of a key. read_queries has Q in the same order, and merge_and_store puts the columns
// of O back.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <limits>

#include "sm80/products.h"

namespace flash::decode {

using namespace sm80;

// The GPU converts codes itself, NaN included.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsCodes = true;
#else
constexpr bool kConvertsCodes = false;
#endif

// Without that instruction a code's bits are put into those of an fp16 number, whose exponent has
// another bias: the number is 2^-8 of the code's, subnormal ones too.
constexpr float kCodeFactor = kConvertsCodes ? 1.f : 1.f / 256;

// Where rows have descales, probabilities are multiplied by this as well, so that they stay normal
// in fp16; descales of rows are up to 255 then.
constexpr float kProbabilityFactor = 256.f;

// Two pairs of fp16 numbers, of the four codes of a word.
struct CodePairs {
  uint32_t first;
  uint32_t second;
};

// The numbers of neighbours where the GPU converts codes, which it does by pairs; else of the first
// and third code, and of the second and fourth, which have the same halves of 16 bits.
__device__ inline CodePairs numbers_of(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  CodePairs pairs;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.first), "=r"(pairs.second)
      : "r"(word));
  return pairs;
#else
  constexpr uint32_t kSigns = 0x80008000, kRest = 0x3f803f80;
  return {(word << 8 & kSigns) | (word << 7 & kRest), (word & kSigns) | (word >> 1 & kRest)};
#endif
}

// The numbers of the first and third code, and of the second and fourth.
__device__ inline CodePairs numbers_of_every_other(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  word = __byte_perm(word, 0, 0x3120);
#endif
  return numbers_of(word);
}

// The highest bit of each byte that is the code of a NaN, which numbers_of takes for 480 where the
// GPU has no instruction.
__device__ inline uint32_t nan_bits(uint32_t word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Four lanes of a warp share a key, or a pair of columns. Whether `lanes` has one of the four that
// share this lane's c-th.
__device__ inline bool has_one_of(unsigned lanes, int lane, int c) {
  return (lanes >> (lane % 4 * 2 + c) * 4 & 0xfu) != 0;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One side of a product in a tile of codes, kRows x kColumns.
template <class Grid, class Way, int kRows, int kColumns>
__device__ auto code_operand(float_e4m3_t const* tile, int lane) {
  using Element = typename Grid::Element;
  return operand_b<Grid, Way, kRows, kColumns / 2>(reinterpret_cast<Element const*>(tile), lane);
}

// Scores of keys with a NaN become NaN.
template <int kN, int kDepth, class Keys, class Scores>
__device__ void spread_nan_of_keys(Keys const& k, int lane, Scores& s) {
  uint32_t nan[kN / 8] = {};
#pragma unroll 1
  for (int step = 0; step < kDepth / 16; step += 2) {
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t words[4];
      k.read(n * 16, step * 8, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        nan[2 * n + i / 2] |= nan_bits(words[i]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kN / 8; ++tile) {
    unsigned const lanes = __ballot_sync(0xffffffffu, nan[tile] != 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = s(i, 0, tile);
      score = has_one_of(lanes, lane, i % 2) ? kNan : score;
    }
  }
}

// s (16, kN) += q (16, kDepth) · k (kN, kDepth)ᵀ, q in operand registers (MMA, 1, kDepth / 16).
template <class Grid, int kN, int kDepth, class Queries, class Scores>
__device__ void multiply_key_codes(Queries const& q, float_e4m3_t const* k, int lane, Scores& s) {
  auto const b = code_operand<Grid, Along, kN, kDepth>(k, lane);
  uint32_t nan = 0;
#pragma unroll
  for (int step = 0; step < kDepth / 16; step += 2) {
    Operands<typename Grid::Element, 2, kN / 8> columns[2];
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t words[4];  // two eights of keys, each of 16 and 16 columns
      b.read(n * 16, step * 8, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        CodePairs const pairs = numbers_of(words[i]);
        nan |= kConvertsCodes ? 0 : nan_bits(words[i]);
        auto& to = columns[i % 2].words[2 * n + i / 2];
        to[0] = pairs.first;
        to[1] = pairs.second;
      }
    }
    gemm(MmaInstruction<half_t>{}, q(_, _, step), columns[0].tensor(), s);
    gemm(MmaInstruction<half_t>{}, q(_, _, step + 1), columns[1].tensor(), s);
  }
  if (!kConvertsCodes && __any_sync(0xffffffffu, nan != 0)) [[unlikely]] {
    spread_nan_of_keys<kN, kDepth>(b, lane, s);
  }
}

// Columns of O that a NaN goes to become NaN.
template <int kN, int kColumns, class Values, class Out>
__device__ void spread_nan_of_values(Values const& v, int lane, Out& o) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 4) {
    uint32_t nan[2] = {};  // of two sixteens of columns
#pragma unroll 1
    for (int step = 0; step < kN / 16; ++step) {
      uint32_t words[4];
      v.read(n * 4, step * 16, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        nan[i / 2] |= nan_bits(words[i]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      uint32_t const bits = tile % 2 == 0 ? 0x00800080u : 0x80008000u;
      unsigned const lanes = __ballot_sync(0xffffffffu, (nan[tile / 2] & bits) != 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = o(i, 0, n + tile);
        sum = has_one_of(lanes, lane, i % 2) ? kNan : sum;
      }
    }
  }
}

// o (16, kColumns) += p (16, kN) · v (kN, kColumns), p in operand registers (MMA, 1, kN / 16).
// Tiles of eight columns of o have the even columns of 16, or the odd ones.
template <class Grid, int kN, int kColumns, class OperandP, class Out>
__device__ void multiply_value_codes(OperandP const& p, float_e4m3_t const* v, int lane, Out& o) {
  auto const b = code_operand<Grid, Across, kN, kColumns>(v, lane);
  uint32_t nan = 0;
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    Operands<typename Grid::Element, 2, kColumns / 8> columns;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 4) {
      uint32_t words[4];  // two sixteens of columns, each of eight and eight keys
      b.read(n * 4, step * 16, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        CodePairs const pairs = numbers_of_every_other(words[i]);
        nan |= kConvertsCodes ? 0 : nan_bits(words[i]);
        columns.words[n + i / 2 * 2][i % 2] = pairs.first;
        columns.words[n + i / 2 * 2 + 1][i % 2] = pairs.second;
      }
    }
    gemm(MmaInstruction<half_t>{}, p(_, _, step), columns.tensor(), o);
  }
  if (!kConvertsCodes && __any_sync(0xffffffffu, nan != 0)) [[unlikely]] {
    spread_nan_of_values<kN, kColumns>(b, lane, o);
  }
}

}  // namespace flash::decode
