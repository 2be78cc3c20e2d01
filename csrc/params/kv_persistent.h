#pragma once

#include "params/common.h"

namespace flash {

// Where one thread block of a backward, or a pair, takes the blocks of keys of a column, which is a
// sequence and a group's part, one after the other. All of a row's dQ then comes from the same
// threads, so sums are theirs, and in L2: the first block of keys puts what the others add to, and
// the last one writes dq.
struct KeyColumns {
  int places;  // thread blocks or pairs, each with sums of one column; 0: each takes one block of
               // keys
  int row_blocks;  // of a query head, that the sums are of
  bool ordered;    // the longest sequence comes first

  FLASH_HD bool used() const { return places > 0; }
};

}  // namespace flash
