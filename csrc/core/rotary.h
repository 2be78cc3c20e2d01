// Rotary position embedding (Su et al., RoFormer, 2104.09864): which two elements of a head are a
// pair, and the rotation of a pair.
#pragma once

#include "params/common.h"

namespace flash {

enum class RotaryLayout {
  Interleaved,  // elements 2p and 2p + 1 are a pair (GPT-J)
  HalfSplit,    // elements p and p + rotary_dim / 2 are a pair (GPT-NeoX)
};

// One element of the rotated head: out[dim] = x[dim] * cos[pair] + sign * x[partner] * sin[pair].
// This is per element, not per pair, because a thread that holds eight neighbours of a half-split
// head does not hold their partners, and has to load them apart.
struct RotaryTerm {
  int pair;     // column of the cos and sin tables, [seqlen, rotary_dim / 2]
  int partner;  // the other element of the pair
  float sign;
};

// dim < rotary_dim; the elements from rotary_dim on stay as they are.
FLASH_HD RotaryTerm rotary_term(RotaryLayout layout, int rotary_dim, int dim) {
  if (layout == RotaryLayout::Interleaved) {
    return {dim / 2, dim ^ 1, dim % 2 == 0 ? -1.f : 1.f};
  }
  int const half = rotary_dim / 2;
  return dim < half ? RotaryTerm{dim, dim + half, -1.f} : RotaryTerm{dim - half, dim - half, 1.f};
}

FLASH_HD float rotate(RotaryTerm term, float x, float partner, float cos, float sin) {
  return x * cos + term.sign * partner * sin;
}

struct Pair {
  float first;
  float second;
};

// A product that is rounded before it is summed, as torch's operations round it: otherwise
// compilers fuse the product and the sum into one instruction.
FLASH_HD float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// The rotated pair, to the bit what the layer computes with torch's operations.
FLASH_HD Pair rotate_pair(Pair x, float cos, float sin) {
  return {rounded_product(x.first, cos) - rounded_product(x.second, sin),
          rounded_product(x.first, sin) + rounded_product(x.second, cos)};
}

}  // namespace flash
