// A paged KV cache: keys of one sequence lie in pages [num_pages, page_size, heads_kv, d] that its
// row of the block table lists.
#pragma once

#include <cstdint>

#include "core/fast_div.h"
#include "params/common.h"

namespace flash {

struct PageSlot {
  int index;  // entry of the sequence's row of the block table
  int row;    // inside the page
};

// Any page size: nothing here asks for a power of two, or for a multiple of the key block.
FLASH_HD PageSlot page_slot(FastDiv const& page_size, int key) {
  int const index = page_size.quotient(key);
  return {index, page_size.remainder(key, index)};
}

struct PagedKeys {
  int const* block_table;  // this sequence's row, [max_pages]
  FastDiv page_size;
  int64_t page_stride;  // elements
  int64_t row_stride;

  // An entry of -1 has no page: padding of a captured graph, neither read nor written.
  static constexpr int64_t no_page = -1;

  // Element offset of a key, key < max_pages * page_size, from the start of the cache, or no_page.
  FLASH_HD int64_t offset(int key) const {
    PageSlot const slot = page_slot(page_size, key);
    int const page = block_table[slot.index];
    return page < 0 ? no_page : page * page_stride + slot.row * row_stride;
  }
};

}  // namespace flash
