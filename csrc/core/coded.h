// Codes of 8 bits (e4m3) of numbers.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace flash {

// The code nearest to |x|, of two the even one, or the largest; not of a NaN. It is the result's
// lowest byte. Arithmetic makes it, because machine code that all GPUs share has none for it.
__device__ inline uint32_t code_of_size(float x) {
  constexpr uint32_t kExponent = 0x7f800000, kLeast = 121u << 23;  // below 2^-6 codes are as dense
  float const size = fminf(fabsf(x), 448.f);
  uint32_t const exponent = std::max(std::bit_cast<uint32_t>(size) & kExponent, kLeast);
  // A sum with 2^20 times the power of two is rounded to eighths of it, whose number is then in the
  // lowest bits. A code is this number and eight for each exponent above the least, for which 56
  // makes up: 121 * 8 + 56 has a lowest byte of 0.
  float const unit = std::bit_cast<float>(exponent + (20u << 23) + 56);
  return std::bit_cast<uint32_t>(size + unit) + (exponent >> 20);
}

// The lowest or the highest bytes of four words.
__device__ inline uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d, bool highest) {
#if defined(__CUDA_ARCH__)
  uint32_t const which = highest ? 0x0073 : 0x0040;
  return __byte_perm(__byte_perm(a, b, which), __byte_perm(c, d, which), 0x5410);
#else
  int const shift = highest ? 24 : 0;
  return (a >> shift & 0xff) | (b >> shift & 0xff) << 8 | (c >> shift & 0xff) << 16 |
         (d >> shift & 0xff) << 24;
#endif
}

// Codes of four numbers, none of which is a NaN.
__device__ inline uint32_t four_codes(float const* x) {
  uint32_t const signs =
      bytes_of(std::bit_cast<uint32_t>(x[0]), std::bit_cast<uint32_t>(x[1]),
               std::bit_cast<uint32_t>(x[2]), std::bit_cast<uint32_t>(x[3]), /*highest=*/true);
  uint32_t const sizes = bytes_of(code_of_size(x[0]), code_of_size(x[1]), code_of_size(x[2]),
                                  code_of_size(x[3]), /*highest=*/false);
  return (signs & 0x80808080u) | sizes;
}

// The bits to set in the codes of four numbers: NaN's code where a number is NaN.
__device__ inline uint32_t nan_codes(float const* x) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word |= x[i] == x[i] ? 0 : 0x7fu << 8 * i;
  }
  return word;
}

// The codes of numbers in units of a scale: the nearest, of two the even one; the largest for those
// beyond it and for infinities; a NaN stays one. By CUTLASS's conversion: decoding, which makes few
// codes, has no registers for another one.
template <int kCount, class Element>
__device__ auto coded(cutlass::Array<Element, kCount> const& numbers, float scale) {
  cutlass::NumericArrayConverter<float, Element, kCount> widen;
  cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, kCount> round;
  cutlass::Array<float, kCount> scaled = widen(numbers);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scaled[i] /= scale;
  }
  return round(scaled);
}

}  // namespace flash
