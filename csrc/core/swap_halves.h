#pragma once

#include <cstdint>

namespace flash {

// Puts the first halves of two words into `a` and the second halves into `b`; it is its own
// inverse.
__device__ inline void swap_halves(uint32_t& a, uint32_t& b) {
  uint32_t const first = (a & 0xffffu) | b << 16, second = a >> 16 | (b & 0xffff0000u);
  a = first;
  b = second;
}

}  // namespace flash
