// Which row blocks see a KV block, and which of them need mask code: block_range.h from the side of
// the keys, for a backward kernel's loop.
#pragma once

#include "core/mask.h"

namespace flash {

// Row blocks [begin, end) in three runs:
//   [begin, left)   some row's right limit, or the end of the keys, cuts through: masked
//   [left, right)   every row sees every key: no mask code
//   [right, end)    some row's left limit cuts through: masked
// There are two orders for steps 0, 1, … count() - 1. In both, all KV blocks go through row blocks
// in the same direction, so that a deterministic kernel can add to them in the KV blocks' order:
//   block_at(step)     the masked blocks first, so that the interior is one run; each run ascends
//   from_last(step)    all descend. KV blocks that start together then want their first common row
//                      block one after the other under any mask; if they ascended, a causal KV
//                      block would have to wait until the one before it reaches its diagonal.
struct RowRange {
  int begin;
  int left;
  int right;
  int end;

  FLASH_HD int count() const { return end - begin; }
  FLASH_HD int masked_count() const { return (left - begin) + (end - right); }

  FLASH_HD int from_last(int step) const { return end - 1 - step; }
  FLASH_HD bool masked(int block) const { return block < left || block >= right; }

  FLASH_HD int block_at(int step) const {
    int const head = left - begin, masked = masked_count();
    if (step < head) {
      return begin + step;
    }
    return step < masked ? right + step - head : left + step - masked;
  }
};

// Keys [key_begin, key_begin + block_n) of a sequence, and the rows [0, seqlen_q) that see some of
// them; rows past seqlen_q in the last block need no mask, their probabilities are 0.
FLASH_HD RowRange row_range(const SequenceMask& mask, int seqlen_q, int key_begin, int block_n,
                            int block_m) {
  auto const blocks = [&](int rows) { return (rows + block_m - 1) / block_m; };
  int const key_end = key_begin + block_n;
  int const key_last = (key_end < mask.seqlen_k ? key_end : mask.seqlen_k) - 1;
  // Row i sees the keys from i - left to i + right.
  int const first = key_begin > mask.right ? key_begin - mask.right : 0;
  int last = key_last + mask.left;
  last = last < seqlen_q ? last : seqlen_q - 1;
  if (key_last < key_begin || last < first) {
    return {0, 0, 0, 0};
  }
  RowRange r{first / block_m, 0, 0, blocks(last + 1)};
  int const first_whole = key_end - 1 > mask.right ? key_end - 1 - mask.right : 0;
  int const whole_end = key_begin + mask.left + 1;
  if (key_end > mask.seqlen_k || whole_end <= first_whole || first_whole >= seqlen_q) {
    r.left = r.right = r.end;  // no interior: everything is one masked run
    return r;
  }
  r.left = blocks(first_whole);
  r.right = whole_end >= seqlen_q ? blocks(seqlen_q) : whole_end / block_m;
  if (r.right <= r.left) {
    r.left = r.right = r.end;
  }
  return r;
}

// The position of a KV block among the KV blocks that add to the same row block's dQ.
struct DqOrder {
  int before;  // KV blocks that the row block sees and that come before this one
  bool last;

  FLASH_HD bool first() const { return before <= 0; }
};

// The order of keys [key_begin, key_begin + block_n), some of which a row of [row_begin, row_last]
// sees. The first row's limits are the least, the last row's the largest, and the KV blocks that a
// row block sees are one run.
FLASH_HD DqOrder dq_order(SequenceMask const& mask, int row_begin, int row_last, int key_begin,
                          int block_n) {
  int const first_block = mask.begin(row_begin) / block_n;
  return {key_begin / block_n - first_block, mask.end(row_last) <= key_begin + block_n};
}

}  // namespace flash
