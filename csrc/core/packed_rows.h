// Where the sequences of a packed tensor lie. On a GPU the host has not looked at cu_seqlens
// beforehand: whatever it holds, the rows returned here are inside the tensor.
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

  // Reads two entries whatever the sequence is: a choice between reads would be one after the
  // other.
  FLASH_HD RowRun run(int sequence) const {
    int const first = entry(sequence < batch ? sequence : batch);
    int const second = entry(sequence < batch ? sequence + 1 : 0);
    int const begin = sequence <= batch ? first : 0;
    int const end = sequence == batch ? total : second;
    return {begin, end > begin ? end - begin : 0};
  }

  // Whose run the row is in; `batch` if it is behind the last one's.
  FLASH_HD int sequence_of(int row) const {
    int ended = 0;  // sequences that end before the row, of which there are at most:
    for (int most = batch; ended < most;) {
      int const middle = ended + (most - ended) / 2;
      if (entry(middle + 1) <= row) {
        ended = middle + 1;
      } else {
        most = middle;
      }
    }
    return ended;
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
  int few;    // another kernel has the sequences of no more rows
  int first;  // row of the first sequence

  FLASH_HD explicit RowOrder(PackedRows const& rows_, int few_ = 0)
      : rows(rows_), few(few_), first(rows_.entry(0)) {}

  // How many rows come before the sequence's; of the number past the last one, before the end.
  FLASH_HD int start(int sequence) const {
    int const start = rows.entry(sequence < rows.batch ? sequence : rows.batch) - first;
    return sequence <= rows.batch       ? (start > 0 ? start : 0)
           : sequence == rows.batch + 1 ? rows.total - first
                                        : rows.total;
  }

  // How many of a sequence's rows are wanted.
  FLASH_HD int wanted(int sequence, int length) const {
    return length > few || sequence >= rows.batch ? length : 0;
  }
};

}  // namespace flash
