// mma.m16n8k16 with fp32 accumulators, for the warps of simt.h.
#pragma once

#include <cutlass/numeric_types.h>

#include <bit>

#include "simt.h"

namespace simt {

enum class Type { kHalf, kBfloat16, kE4m3 };

// The upper half of a float.
inline float bfloat16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Looked up: there are subnormal numbers.
inline float half_to_float(uint16_t bits) {
  static std::vector<float> const values = [] {
    std::vector<float> all(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      all[i] = static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(i)));
    }
    return all;
  }();
  return values[bits];
}

// A lane's fragments, as in the PTX manual, "Matrix Fragments for mma.m16n8k16".
void mma_16x8x16(Type type, float* const (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2],
                 float const (&c)[4]);

}  // namespace simt
