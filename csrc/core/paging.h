// Where the keys of one sequence lie: in pages [count, page_size, heads_kv, d] that its row of the
// block table lists, or in one run of rows, which is a single page as far as addresses go.
#pragma once

#include "core/block_info.h"

namespace flash {

// page * batch_stride + row * row_stride is the offset of a key in K and in V.
struct PageSlot {
  int page;
  int row;

  static constexpr int kNoPage = -1;
};

struct KeyPages {
  int const* table;  // this sequence's row of the block table; null: all keys are in page `only`
  int entries;
  int count;  // pages that exist
  int only;
  FastDiv page_size;

  FLASH_HD KeyPages(Pages const& pages, BlockInfo const& info, int sequence)
      : table(pages.table ? pages.table + sequence * pages.table_stride : nullptr),
        entries(pages.per_sequence),
        count(pages.table ? pages.count : info.batch_k + 1),
        only(info.batch_k),
        page_size(pages.page_size) {}

  // For keys that are in pages.
  FLASH_HD KeyPages(Pages const& pages, int sequence)
      : table(pages.table + sequence * pages.table_stride),
        entries(pages.per_sequence),
        count(pages.count),
        only(0),
        page_size(pages.page_size) {}

  // Takes any page size, not only powers of two or multiples of the KV block. The page may be one
  // that does not exist; `exists` finds this out where the page is needed, because by then the
  // table's entry has arrived.
  FLASH_HD PageSlot slot(int position) const {
    if (!table) {
      return {only, position};
    }
    int const entry = page_size.quotient(position);
    return {page(entry), page_size.remainder(position, entry)};
  }

  // A table that is shorter than the sequence lists no more pages.
  FLASH_HD int page(int entry) const { return entry < entries ? table[entry] : PageSlot::kNoPage; }

  // An entry of -1 has no page: padding of a captured graph, neither read nor written.
  FLASH_HD bool exists(PageSlot slot) const { return uint32_t(slot.page) < uint32_t(count); }
};

}  // namespace flash
