// Codes of 8 bits (e4m3) of numbers.
#pragma once

#include <cutlass/numeric_conversion.h>

namespace flash {

// The codes of numbers in units of a scale: the nearest, of two the even one; the largest for those
// beyond it and for infinities; a NaN stays one.
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
