#pragma once

#include "params/fast_div.h"

namespace flash {

constexpr int kAllQueries = INT32_MAX;

// Where each sequence lies and how long it is. Null pointers mean: the fixed length applies.
struct Seqlens {
  int batch;     // sequences
  int seqlen_q;  // fixed length, or an upper bound when cu_q is given
  int seqlen_k;
  int64_t total_q;       // rows in the varlen q; 0 when q is [b, s, h, d]
  const int* cu_q;       // [b + 1] start row of each sequence in the varlen q
  const int* cu_k;       // [b + 1]
  const int* used_k;     // [b] keys in use, at most what cu_k or seqlen_k allows
  const int* leftpad_k;  // [b] keys to skip at the start
  int64_t total_k = 0;   // rows in the varlen k and v; 0 when they are [b, s, h, d]
  // For a varlen q: the decode kernel computes the sequences of up to so many queries, the forward
  // kernel the others and the rows of no sequence. kAllQueries: the decode kernel computes all.
  int few_q = 0;
  // For keys in pages, cu_k gives lengths alone, and no sequence has more than seqlen_k.
  bool in_pages = false;
  // For a cache:
  int new_k = 0;  // keys just appended after used_k, of every sequence that has one >= 0
  const int* batch_k = nullptr;  // [b] where a sequence's keys are; null: at its own index
  int batches_k = 0;             // entries of the cache; a batch_k outside of them has no keys
};

// Rows of k, and of v, of all sequences.
FLASH_HD int64_t num_keys(const Seqlens& s) {
  return s.cu_k ? s.total_k : int64_t(s.batch) * s.seqlen_k;
}

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
