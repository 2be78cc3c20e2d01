// Which of the key blocks that see a row block one of them is, in their order.
#pragma once

#include "core/mask.h"

namespace flash {

struct DqOrder {
  int before;  // key blocks that see the row block and come before it
  bool last;

  FLASH_HD bool first() const { return before <= 0; }
};

// Of keys [key_begin, key_begin + block_n), which some row of [row_begin, row_last] sees. The first
// row's limits are the least ones, the last row's the largest, and what a row block sees is one
// run.
FLASH_HD DqOrder dq_order(SequenceMask const& mask, int row_begin, int row_last, int key_begin,
                          int block_n) {
  int const first_block = mask.begin(row_begin) / block_n;
  return {key_begin / block_n - first_block, mask.end(row_last) <= key_begin + block_n};
}

}  // namespace flash
