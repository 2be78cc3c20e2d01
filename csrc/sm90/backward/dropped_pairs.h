// Dropout for tiles that multiply by P right away: which entries are dropped, two at a time.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "core/dropout.h"

namespace flash::sm90::backward {

// One bit for each of a thread's transposed scores (2 keys, 32 queries), in blocks of 16 queries.
struct DroppedPairs {
  static constexpr int kBlocks = 8;

  // Bits of the even queries, and of the odd ones. Bit 4 * block + 2 * (key >> 3) + (query >> 3),
  // in the order in which words are drawn.
  uint32_t even, odd;

  // first: the octet that the lane draws for the first block. A lane draws a query's bits for two
  // keys, its own and its partner's; of a word's halves it keeps those of its own key.
  __device__ __forceinline__ DroppedPairs(DropoutMask const& mask, DropoutOctet first,
                                          TransposedDropout lane) {
    uint32_t const kLower = 0x5410, kUpper = 0x7632;  // halves, of two words
    HalvesBelow const below(mask.threshold);
    uint32_t drawn[2] = {0, 0};  // of four blocks each, halves by the key's parity
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      PhiloxWords const random = mask.draw<true>(first.later(block, 0));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        drawn[block / 4] |= below(random.word[w]) & (0x10001u << (block % 4 * 4 + w));
      }
    }
    bool const odd_key = lane.odd_key();
    uint32_t const own = permuted_bytes(drawn[0], drawn[1], odd_key ? kUpper : kLower);
    uint32_t const others = permuted_bytes(drawn[0], drawn[1], odd_key ? kLower : kUpper);
    uint32_t const partners = __shfl_xor_sync(0xffffffffu, others, 4);
    even = odd_key ? partners : own;
    odd = odd_key ? own : partners;
  }

  // Calls drop(r, c, halves), where halves masks those of entries (r, c) and (r, c + 1) that are
  // dropped.
  template <class Drop>
  __device__ __forceinline__ void for_each_pair(Drop drop) const {
#pragma unroll
    for (int bit = 0; bit < 4 * kBlocks; ++bit) {
      drop(bit / 2 % 2, bit / 4 * 4 + bit % 2 * 2, halves_of_bit(even, odd, bit));
    }
  }
};

// Sets a and b to 0 where a word's halves are 0, by selections, which the compiler may not move
// behind a multiplication.
template <class Element>
__device__ __forceinline__ void clear_where_zero(uint32_t word, float& a, float& b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("{ .reg .pred p, q; setp.neu.bf16x2 p|q, %2, %3; selp.f32 %0, %0, 0f00000000, p; "
        "selp.f32 %1, %1, 0f00000000, q; }"
        : "+f"(a), "+f"(b)
        : "r"(word), "r"(0));
  } else {
    asm("{ .reg .pred p, q; setp.neu.f16x2 p|q, %2, %3; selp.f32 %0, %0, 0f00000000, p; "
        "selp.f32 %1, %1, 0f00000000, q; }"
        : "+f"(a), "+f"(b)
        : "r"(word), "r"(0));
  }
#else
  a = word & 0x7fff ? a : 0.f;
  b = word & 0x7fff0000 ? b : 0.f;
#endif
}

}  // namespace flash::sm90::backward
