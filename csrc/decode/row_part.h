// A few columns of a new row or a query in a thread's registers, and their rotary embedding.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cstdint>

#include "decode/config.h"

namespace flash::decode {

// Puts the first halves of two words into `a` and the second halves into `b`; it is its own
// inverse.
__device__ inline void swap_halves(uint32_t& a, uint32_t& b) {
  uint32_t const first = (a & 0xffffu) | b << 16, second = a >> 16 | (b & 0xffff0000u);
  a = first;
  b = second;
}

// Four pairs to rotate, or eight neighbours that are copied. Code that runs once takes the time, so
// both layouts, and queries and keys, share it: interleaved pairs are taken apart before the
// rotation and put together behind it.
template <class Element>
struct RowPart {
  static constexpr int kPairs = 4, kColumns = 2 * kPairs;
  using Chunk = cutlass::AlignedArray<Element, kPairs>;

  int first;  // column of x
  int second;
  Chunk x;
  Chunk y;
  Chunk cos;
  Chunk sin;

  __device__ void rotate(bool interleaved) {
    if (interleaved) {
      take_apart();
    }
    cutlass::NumericArrayConverter<float, Element, kPairs> widen;
    auto const a = widen(x), b = widen(y), c = widen(cos), s = widen(sin);
    cutlass::Array<float, kPairs> rotated_a, rotated_b;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      rotated_a[i] = a[i] * c[i] - b[i] * s[i];
      rotated_b[i] = b[i] * c[i] + a[i] * s[i];
    }
    cutlass::NumericArrayConverter<Element, float, kPairs> round;
    static_cast<cutlass::Array<Element, kPairs>&>(x) = round(rotated_a);
    static_cast<cutlass::Array<Element, kPairs>&>(y) = round(rotated_b);
    if (interleaved) {
      put_together();
    }
  }

 private:
  using Words = uint32_t (&)[2];

  // From two pairs in x and two in y: the first elements to x, the second ones to y.
  __device__ void take_apart() {
    auto& u = reinterpret_cast<Words>(x);
    auto& v = reinterpret_cast<Words>(y);
    swap_halves(u[0], u[1]);
    swap_halves(v[0], v[1]);
    exchange(u[1], v[0]);
  }

  __device__ void put_together() {
    auto& u = reinterpret_cast<Words>(x);
    auto& v = reinterpret_cast<Words>(y);
    exchange(u[1], v[0]);
    swap_halves(u[0], u[1]);
    swap_halves(v[0], v[1]);
  }

  static __device__ void exchange(uint32_t& a, uint32_t& b) {
    uint32_t const old = a;
    a = b;
    b = old;
  }
};

}  // namespace flash::decode
