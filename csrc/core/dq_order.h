// The position of a KV block among the KV blocks that add to the same row block's dQ.
#pragma once

#include "core/mask.h"

namespace flash {

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
