#pragma once

#include "params/common.h"

namespace flash {

// A CTA of a backward, or a pair, takes all KV blocks of a sequence and GQA split, one after the
// other. All of a row's dQ then comes from the same threads, so its sums are theirs alone, and in
// L2: the first KV block stores, the others add, and the last one writes dq.
struct KvPersistent {
  int resident;    // CTAs or pairs, each with sums of its own; 0: the schedule is another one
  int row_blocks;  // of a query head; each has sums
  bool ordered;    // the longest sequence comes first

  FLASH_HD bool used() const { return resident > 0; }
};

}  // namespace flash
