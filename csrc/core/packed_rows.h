// Where the sequences of a packed tensor lie. On a GPU nobody has looked at cu_seqlens beforehand:
// whatever it holds, what comes from here is inside the tensor.
#pragma once

#include "params/common.h"

namespace flash {

struct RowRun {
  int begin;
  int length;
};

struct PackedRows {
  const int* cu;  // [batch + 1]
  int batch;
  int total;  // rows of the tensor

  // Two sequences more than there are stand for the rows that belong to none: number `batch` for
  // those behind the last one, number batch + 1 for those before the first.
  FLASH_HD static int count(int batch) { return batch + 2; }

  FLASH_HD RowRun run(int sequence) const {
    int const begin = sequence <= batch ? entry(sequence) : 0;
    int const end = sequence < batch ? entry(sequence + 1) : sequence == batch ? total : entry(0);
    return {begin, end > begin ? end - begin : 0};
  }

  // The rows of a sequence that has more than `few`, or of none; else 0.
  FLASH_HD int length_if_more(int sequence, int few) const {
    int const length = run(sequence).length;
    return length > few || sequence >= batch ? length : 0;
  }

  // cu[i]
  FLASH_HD int entry(int i) const {
    int const row = cu[i] > 0 ? cu[i] : 0;
    return row < total ? row : total;
  }
};

// The same in the order in which tiles are numbered: the rows before the first sequence come last.
struct RowOrder {
  PackedRows rows;
  int few;    // sequences of no more rows are somebody else's
  int first;  // row of the first sequence

  FLASH_HD explicit RowOrder(PackedRows const& rows_, int few_ = 0)
      : rows(rows_), few(few_), first(rows_.entry(0)) {}

  // How many rows come before the sequence's; of the number past the last one, before the end.
  FLASH_HD int start(int sequence) const {
    if (sequence > rows.batch) {
      return sequence == rows.batch + 1 ? rows.total - first : rows.total;
    }
    int const start = rows.entry(sequence) - first;
    return start > 0 ? start : 0;
  }

  FLASH_HD int length(int sequence) const { return rows.length_if_more(sequence, few); }
};

}  // namespace flash
