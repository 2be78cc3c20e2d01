// Masks as limits per row: no mask kind is a template parameter.
#pragma once

#include "core/block_info.h"
#include "params/mask.h"

namespace flash {

// Keys [begin, end) that one row sees.
struct KeyLimits {
  int begin;
  int end;
};

// Longer than any sequence, and still an int when a row index is added to it.
constexpr int kUnbounded = 1 << 30;

// The mask of one sequence, with the bottom-right alignment and the key length folded in:
// row i sees keys max(0, i - left) … min(seqlen_k, i + right + 1) - 1.
struct SequenceMask {
  int left;
  int right;
  int seqlen_k;

  FLASH_HD SequenceMask(const Mask& mask, int seqlen_q, int seqlen_k_)
      : left(mask.left < 0 ? kUnbounded : mask.left - (seqlen_k_ - seqlen_q)),
        right(mask.right < 0 ? kUnbounded : mask.right + (seqlen_k_ - seqlen_q)),
        seqlen_k(seqlen_k_) {}

  FLASH_HD int begin(int row) const { return row > left ? row - left : 0; }

  FLASH_HD int end(int row) const {
    int const end = row + right + 1;
    return end < seqlen_k ? end : seqlen_k;
  }

  FLASH_HD KeyLimits limits(int row) const { return {begin(row), end(row)}; }
};

// Which of a thread's keys lie in [begin, end), both counted from its first one: bit n is key
// n % 2 + n / 2 * 8, the columns that a tensor-core accumulator gives it (fragment_coord.h).
FLASH_HD uint32_t fragment_bits(int begin, int end) {
  auto const below = [](int limit) {
    int const keys = limit <= 0 ? 0 : limit / 8 * 2 + (limit % 8 < 2 ? limit % 8 : 2);
    return keys < 32 ? (uint32_t{1} << keys) - 1 : ~uint32_t{0};
  };
  return below(end) & ~below(begin);
}

}  // namespace flash
