// Which KV blocks a row block goes through, and which of them need mask code.
#pragma once

#include "core/mask.h"

namespace flash {

// KV blocks [begin, end) in three runs:
//   [right, end)    some row's right limit, or the end of the keys, cuts through: masked
//   [left, right)   every row sees every key: no mask code
//   [begin, left)   some row's left limit cuts through: masked
// The softmax does not care for the order, so the masked blocks come first, right before left, and
// the interior is one run without a branch: step 0, 1, … count() - 1 is block_at(step).
struct BlockRange {
  int begin;
  int left;
  int right;
  int end;

  static constexpr int kNone = -1;  // no block

  FLASH_HD int count() const { return end - begin; }
  FLASH_HD int masked_count() const { return (end - right) + (left - begin); }

  FLASH_HD int block_at(int step) const {
    int const after_right = step - (end - right);
    if (after_right < 0) {
      return end - 1 - step;
    }
    int const after_left = after_right - (left - begin);
    return after_left < 0 ? left - 1 - after_right : right - 1 - after_left;
  }

  // block_at(step) + step, which is the same for all steps after the masked ones
  FLASH_HD int interior() const { return right - 1 + masked_count(); }

  // One of several even KV splits, which follow each other along the keys. A sequence has fewer
  // than 2^26 blocks, and 32 splits at most.
  FLASH_HD BlockRange split(int number, FastDiv const& splits) const {
    int const blocks = end - begin;
    auto const clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    BlockRange r;
    r.begin = begin + splits.quotient(blocks * number);
    r.end = begin + splits.quotient(blocks * (number + 1));
    r.right = clamp(right, r.begin, r.end);
    r.left = clamp(left, r.begin, r.right);
    return r;
  }

  // How many of the first steps are blocks that no row before `row_end` sees, because all of them
  // lie right of its limit: the part of the row block before `row_end`, at least one row, need not
  // compute these.
  FLASH_HD int steps_right_of(const SequenceMask& mask, int row_end, int block_n) const {
    int const key_end = mask.end(row_end - 1);
    int const seen_end = key_end > 0 ? (key_end + block_n - 1) / block_n : 0;
    return seen_end >= end ? 0 : end - (seen_end > begin ? seen_end : begin);
  }

  FLASH_HD bool masked(int block) const { return block < left || block >= right; }

  // The block of the next step, or kNone: the order of block_at for loops that have the block and
  // not the step's number (sm80's, and that of pairs of CTAs). Nearly every block is in the
  // interior, where only the first line runs.
  FLASH_HD int after(int block) const {
    if (!masked(block)) return block > left ? block - 1 : kNone;
    if (block > right || (block < left && block > begin)) return block - 1;
    if (block == right && left > begin) return left - 1;
    return right > left ? right - 1 : kNone;
  }
};

// Rows [row_begin, row_end) of the sequence, row_begin < row_end.
FLASH_HD BlockRange block_range(const SequenceMask& mask, int row_begin, int row_end, int block_n) {
  int const row_last = row_end - 1;
  int const key_end = mask.end(row_last);  // limits grow with the row
  int const key_begin = mask.begin(row_begin);
  BlockRange r;
  r.end = key_end > 0 ? (key_end + block_n - 1) / block_n : 0;
  r.begin = key_begin / block_n;
  if (r.end <= r.begin) {
    return {0, 0, 0, 0};
  }
  int const first_row_end = mask.end(row_begin);
  int const last_row_begin = mask.begin(row_last);
  r.right = first_row_end > 0 ? first_row_end / block_n : 0;
  r.left = (last_row_begin + block_n - 1) / block_n;
  r.right = r.right > r.begin ? r.right : r.begin;
  r.left = r.left < r.right ? r.left : r.right;  // no interior: everything is one masked run
  return r;
}

}  // namespace flash
