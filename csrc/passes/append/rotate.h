// Rotary embedding of eight neighbouring elements of a row.
#pragma once

#include "core/rotary.h"
#include "params/append_params.h"
#include "sm80/tensor_core.h"

namespace flash::append {

using namespace cute;

// kCount elements as floats; in one access if they are aligned to it.
template <int kCount, class Element>
__device__ void read(Element const* source, float (&to)[kCount]) {
  using Vector = cutlass::AlignedArray<Element, kCount>;
  Vector elements;
  if (reinterpret_cast<uintptr_t>(source) % sizeof(Vector) == 0) {
    elements = *reinterpret_cast<Vector const*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      elements[i] = source[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = static_cast<float>(elements[i]);
  }
}

// cos and sin of one position
template <class Element>
struct Angles {
  Element const* cos;  // [rotary_dim / 2]
  Element const* sin;

  // A position beyond the tables is an error that cannot be reported from here; clamped, it causes
  // no fault at least.
  __device__ Angles(Rotary const& r, uint32_t position)
      : cos(static_cast<Element const*>(r.cos) + row(r, position) * r.cos_stride),
        sin(static_cast<Element const*>(r.sin) + row(r, position) * r.sin_stride) {}

 private:
  __device__ static int64_t row(Rotary const& r, uint32_t position) {
    return min(position, uint32_t(r.positions) - 1);
  }
};

// Rotates elements [col, col + 8) of the row one by one, where pairs and chunks do not fit
// together.
template <class Element>
__device__ void rotate_each(Rotary const& r, Angles<Element> const& at, Element const* row, int col,
                            float (&x)[8]) {
  RotaryLayout const layout = r.interleaved ? RotaryLayout::Interleaved : RotaryLayout::HalfSplit;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (col + e < r.rotary_dim) {
      RotaryTerm const term = rotary_term(layout, r.rotary_dim, col + e);
      x[e] = rotate(term, x[e], static_cast<float>(row[term.partner]),
                    static_cast<float>(at.cos[term.pair]), static_cast<float>(at.sin[term.pair]));
    }
  }
}

// Rotates elements [col, col + 8) of a row, which x holds at first.
template <class Element>
__device__ void rotate_chunk(Rotary const& r, Angles<Element> const& at, Element const* row,
                             int col, float (&x)[8]) {
  int const half = r.rotary_dim / 2;
  if (col + 8 <= r.rotary_dim && r.interleaved) {
    float cos[4], sin[4];
    read(at.cos + col / 2, cos);
    read(at.sin + col / 2, sin);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      float const even = x[e], odd = x[e + 1];
      x[e] = rotate({0, 0, -1.f}, even, odd, cos[e / 2], sin[e / 2]);
      x[e + 1] = rotate({0, 0, 1.f}, odd, even, cos[e / 2], sin[e / 2]);
    }
  } else if (col + 8 <= r.rotary_dim && half % 8 == 0) {
    RotaryTerm const term = rotary_term(RotaryLayout::HalfSplit, r.rotary_dim, col);
    float partner[8], cos[8], sin[8];
    read(row + term.partner, partner);
    read(at.cos + term.pair, cos);
    read(at.sin + term.pair, sin);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = rotate(term, x[e], partner[e], cos[e], sin[e]);
    }
  } else if (col < r.rotary_dim) {
    rotate_each(r, at, row, col, x);
  }
}

}  // namespace flash::append
