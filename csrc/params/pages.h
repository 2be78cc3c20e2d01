#pragma once

#include <cstdint>

#include "params/fast_div.h"

namespace flash {

// A paged KV cache: K and V are [count, page_size, hk, d], and a sequence's keys lie in the pages
// that its row of the block table lists.
struct Pages {
  const int* table;      // [b, per_sequence]; null: K and V are not paged
  int64_t table_stride;  // from row to row
  int per_sequence;
  FastDiv page_size;
  int count;  // entries of the table outside [0, count), such as -1, stand for no page
};

}  // namespace flash
