// Every per-sequence read of device memory happens here: after it only values travel.
#pragma once

#include <cstdint>

#include "params/common.h"
#include "params/seqlens.h"

namespace flash {

struct BlockInfo {
  int seqlen_q;   // rows of this sequence
  int seqlen_k;   // keys that may be attended to: used, and right of the left padding
  int slots_k;    // keys that exist, attended to or not, left padding included
  int64_t row_q;  // first row in the packed tensor; 0 when q is [b, s, h, d]
  int64_t row_k;  // first key: row of the packed k, or position in the sequence's cache
  int leftpad;    // keys that row_k skips
  int batch_k;    // the cache's entry with the sequence's keys; -1: there is none

  // Sequence number `batch` one past the last stands for the rows of a packed q behind
  // cu_q[batch]: a sequence without keys, so that they become zeros like any fully masked row. And
  // for the keys behind cu_k[batch], which nobody attends to.
  FLASH_HD BlockInfo(const Seqlens& s, int sequence) {
    row_q = s.cu_q ? s.cu_q[sequence] : 0;
    if (sequence == s.batch) {
      seqlen_q = static_cast<int>(s.total_q - row_q);
      seqlen_k = 0;
      row_k = s.cu_k ? s.cu_k[sequence] : 0;
      slots_k = static_cast<int>(s.total_k - row_k);
      leftpad = batch_k = 0;
      return;
    }
    seqlen_q = s.cu_q ? s.cu_q[sequence + 1] - static_cast<int>(row_q) : s.seqlen_q;
    row_k = s.cu_k ? s.cu_k[sequence] : 0;
    slots_k = s.cu_k ? s.cu_k[sequence + 1] - static_cast<int>(row_k) : s.seqlen_k;
    // Not more than exist, whatever a caller says: on a GPU nobody checks contents beforehand.
    int used = s.used_k ? s.used_k[sequence] : slots_k;
    used = used < 0 ? 0 : used < slots_k - s.new_k ? used + s.new_k : slots_k;
    batch_k = s.batch_k ? s.batch_k[sequence] : sequence;
    if (s.batch_k && uint32_t(batch_k) >= uint32_t(s.batches_k)) {
      batch_k = -1;
      used = 0;
    }
    leftpad = s.leftpad_k ? s.leftpad_k[sequence] : 0;
    row_k += leftpad;
    seqlen_k = used > leftpad ? used - leftpad : 0;
  }
};

}  // namespace flash
