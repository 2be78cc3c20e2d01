// Rows of pack-GQA: the query heads that share a KV head are rows beside each other, so that the
// keys are read once for all of them.
#pragma once

#include "params/common.h"
#include "params/fast_div.h"

namespace flash {

struct QueryRow {
  int query;
  int head;  // of the group
};

// Row r of queries with `group` heads each.
FLASH_HD QueryRow query_row(FastDiv const& group, int r) {
  int const query = group.quotient(r);
  return {query, group.remainder(r, query)};
}

}  // namespace flash
