// Philox4x32: a counter-based random generator (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). It keeps no state: 128 random bits are a function of a counter and a key.
#pragma once

#include "params/common.h"

namespace flash {

struct PhiloxKey {
  uint32_t word[2];
};

struct PhiloxWords {  // a counter, or the bits drawn for it
  uint32_t word[4];
};

// Both halves of a product by one instruction. From C++ the compiler computes each half by itself:
// two instructions, but their two result registers need not be neighbours.
template <uint32_t kFactor>
FLASH_HD uint64_t wide_product(uint32_t x) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "n"(kFactor));
  return product;
#else
  return uint64_t{kFactor} * x;
#endif
}

// 7 rounds are the fewest that pass BigCrush; dropout uses those. 10 is the usual safety margin.
// kWide: computes with wide_product.
template <int kRounds, bool kWide = false>
FLASH_HD PhiloxWords philox(PhiloxKey key, PhiloxWords counter) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    constexpr uint32_t kFactor0 = 0xD2511F53, kFactor1 = 0xCD9E8D57;
    uint64_t const product0 =
        kWide ? wide_product<kFactor0>(counter.word[0]) : uint64_t{kFactor0} * counter.word[0];
    uint64_t const product1 =
        kWide ? wide_product<kFactor1>(counter.word[2]) : uint64_t{kFactor1} * counter.word[2];
    counter = {{uint32_t(product1 >> 32) ^ counter.word[1] ^ key.word[0], uint32_t(product1),
                uint32_t(product0 >> 32) ^ counter.word[3] ^ key.word[1], uint32_t(product0)}};
    key.word[0] += 0x9E3779B9u;
    key.word[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace flash
