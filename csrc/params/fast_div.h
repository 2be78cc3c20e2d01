#pragma once

#include "params/common.h"

namespace flash {

// n / divisor as a multiplication and a shift (Granlund and Montgomery, PLDI 1994), for a divisor
// known at launch and 0 <= n < 2^31. A paged kernel divides once per key row, in its load loop,
// where the long instruction sequence of an integer division would show.
struct FastDiv {
  uint32_t divisor;
  uint32_t multiplier;  // ceil(2^shift / divisor), which fits 32 bits
  int shift;            // 31 + ceil(log2(divisor))

  FLASH_HD FastDiv() : FastDiv(1) {}

  FLASH_HD explicit FastDiv(int divisor_) : divisor(uint32_t(divisor_)), shift(31) {
    while ((uint64_t{1} << (shift - 31)) < divisor) {
      ++shift;
    }
    multiplier = uint32_t(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  FLASH_HD int quotient(int n) const { return int((uint64_t(uint32_t(n)) * multiplier) >> shift); }
  FLASH_HD int remainder(int n, int quotient) const { return n - quotient * int(divisor); }
};

}  // namespace flash
