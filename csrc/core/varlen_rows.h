// Where the sequences of a varlen tensor lie. On a GPU cu_seqlens was not checked beforehand:
// whatever it holds, the rows that this file returns are inside the tensor.
#pragma once

#include "params/common.h"

namespace flash {

struct RowRun {
  int begin;
  int length;
};

struct VarlenRows {
  const int* cu;  // [batch + 1]
  int batch;
  int total;  // rows of the tensor

  // Two sequences beyond the batch stand for the rows that belong to none: number `batch` for the
  // rows after the last sequence, number batch + 1 for the rows before the first.
  FLASH_HD static int count(int batch) { return batch + 2; }

  // Reads two entries whatever the sequence is: with a choice between reads they would come one
  // after the other.
  FLASH_HD RowRun run(int sequence) const {
    int const first = entry(sequence < batch ? sequence : batch);
    int const second = entry(sequence < batch ? sequence + 1 : 0);
    int const begin = sequence <= batch ? first : 0;
    int const end = sequence == batch ? total : second;
    return {begin, end > begin ? end - begin : 0};
  }

  // The sequence that the row is in; `batch` if the row is after the last one.
  FLASH_HD int sequence_of(int row) const {
    int ended = 0;  // sequences that end before the row; at least this many, at most `most`
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

// The same rows in the order in which tiles are numbered: rows before the first sequence come last.
struct RowOrder {
  VarlenRows rows;
  int few;    // another kernel computes sequences of no more rows
  int first;  // row of the first sequence

  FLASH_HD explicit RowOrder(VarlenRows const& rows_, int few_ = 0)
      : rows(rows_), few(few_), first(rows_.entry(0)) {}

  // How many rows come before the sequence; for the number past the last one, before the end.
  FLASH_HD int start(int sequence) const {
    int const start = rows.entry(sequence < rows.batch ? sequence : rows.batch) - first;
    return sequence <= rows.batch       ? (start > 0 ? start : 0)
           : sequence == rows.batch + 1 ? rows.total - first
                                        : rows.total;
  }

  // How many of a sequence's rows this kernel computes.
  FLASH_HD int wanted(int sequence, int length) const {
    return length > few || sequence >= rows.batch ? length : 0;
  }
};

}  // namespace flash
