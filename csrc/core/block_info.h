// The lengths and places of one sequence. Every per-sequence read of device memory happens here;
// after it only values travel.
#pragma once

#include "core/varlen_rows.h"
#include "params/seqlens.h"

namespace flash {

struct BlockInfo {
  int seqlen_q;   // rows of this sequence
  int seqlen_k;   // keys that may be attended to: used, and right of the left padding
  int slots_k;    // keys that exist, attended to or not, left padding included
  int64_t row_q;  // first row in the varlen tensor; 0 when q is [b, s, h, d]
  int64_t row_k;  // first key: row of the varlen k, or position in the sequence's cache
  int leftpad;    // keys that row_k skips
  int batch_k;    // the cache's entry with the sequence's keys; -1: there is none

  // The sequences beyond the batch (see VarlenRows) have rows of a varlen q but no keys, so that
  // these rows become zeros like any fully masked row. No row attends to keys of theirs.
  FLASH_HD BlockInfo(const Seqlens& s, int sequence) {
    RowRun const rows = rows_of(s, sequence), keys = keys_of(s, sequence);
    row_q = rows.begin;
    seqlen_q = rows.length;
    row_k = keys.begin;
    slots_k = keys.length;
    if (sequence >= s.batch) {
      seqlen_k = leftpad = batch_k = 0;
      return;
    }
    // Not more than exist, whatever a caller says: on a GPU contents are not checked beforehand.
    int used = s.used_k ? s.used_k[sequence] : slots_k;
    used = used < 0 ? 0 : used < slots_k - s.new_k ? used + s.new_k : slots_k;
    batch_k = s.batch_k ? s.batch_k[sequence] : sequence;
    if (s.batch_k && uint32_t(batch_k) >= uint32_t(s.batches_k)) {
      batch_k = -1;
      used = 0;
    }
    leftpad = s.leftpad_k ? s.leftpad_k[sequence] : 0;
    leftpad = leftpad < 0 ? 0 : leftpad < slots_k ? leftpad : slots_k;
    row_k += leftpad;
    seqlen_k = used > leftpad ? used - leftpad : 0;
  }

 private:
  FLASH_HD static RowRun rows_of(const Seqlens& s, int sequence) {
    return s.cu_q ? VarlenRows{s.cu_q, s.batch, int(s.total_q)}.run(sequence)
                  : RowRun{0, s.seqlen_q};
  }

  FLASH_HD static RowRun keys_of(const Seqlens& s, int sequence) {
    if (!s.cu_k) {
      return {0, s.seqlen_k};
    }
    if (!s.in_pages) {
      return VarlenRows{s.cu_k, s.batch, int(s.total_k)}.run(sequence);
    }
    int const length = VarlenRows{s.cu_k, s.batch, INT32_MAX}.run(sequence).length;
    return {0, length < s.seqlen_k ? length : s.seqlen_k};
  }
};

}  // namespace flash
