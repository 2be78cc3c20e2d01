// A call in numbers, without addresses and decisions. A plan depends on this, the machine and the
// table of kernels alone (docs/plan.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params/mask.h"

namespace flash::plan {

struct Problem {
  int batch;        // sequences
  int seqlen_q;     // rows of each sequence, or of the longest
  int seqlen_k;     // keys of each sequence, or of the longest; a cache's capacity
  int64_t total_q;  // rows of all sequences
  int64_t total_k;  // keys of all sequences; batch * capacity for a cache
  bool varlen_q;    // varlen: only the device knows the lengths
  bool varlen_k;
  bool used_k;  // only the device knows how many of the keys are in use
  int heads_q;
  int heads_kv;    // divides heads_q
  int head_dim;    // of q and k
  int head_dim_v;  // of v and out
  Mask mask;       // negative widths: no limit
  bool dropout;
  bool max_logits;       // are wanted, which KV splits and long tiles of pages do not keep
  bool batch_invariant;  // a sequence's result may not depend on the others
  // Only for a forward or a decode:
  int page_size;      // 0: not in pages
  bool page_boxes;    // TMA can load boxes of pages: their size is a multiple of 8, no left padding
  bool cached;        // flash_attn_with_kvcache
  bool odd_rows;      // a cache's rows are not whole chunks of 16 bytes
  bool codes;         // a cache holds codes of 8 bits
  bool only_decoded;  // a latent cache, or codes, that no forward kernel reads
  bool heads_apart;   // q's head stride is not 0, so that a box can hold several heads
  bool whole_rows;    // batch entries, or pages, are multiples of 8 rows apart
  int num_splits;     // 0: as many as are best; 1: none; n: n pieces, or at most n KV splits
  // The decode kernel computes the batch's short sequences at the same time.
  bool beside_decode;
  // Only for a backward:
  bool deterministic;
  bool wants_dq;

  bool operator==(Problem const&) const = default;

  int group() const { return std::max(heads_q / std::max(heads_kv, 1), 1); }
  double mean_q() const { return double(total_q) / std::max(batch, 1); }
  double mean_k() const { return double(total_k) / std::max(batch, 1); }
  // Long sequences of a varlen batch, if each has seqlen_q queries and every other sequence one; at
  // least 1.
  int long_ones() const {
    return static_cast<int>(
        std::clamp<int64_t>((total_q - batch) / std::max(seqlen_q - 1, 1), 1, std::max(batch, 1)));
  }
  // The same problem for `sequences` of its sequences, of `queries` queries each.
  Problem part(int sequences, int queries) const {
    Problem some = *this;
    some.batch = sequences;
    some.seqlen_q = queries;
    some.total_q = int64_t(sequences) * queries;
    some.total_k = std::min(total_k, int64_t(sequences) * seqlen_k);
    return some;
  }
  // Whether every sequence is as long as the longest.
  bool alike() const {
    return total_q == int64_t(batch) * seqlen_q && total_k == int64_t(batch) * seqlen_k && !used_k;
  }
  // Whether a limit of the mask hides some key from some row: the left one the first key from the
  // last row, the right one the last key from the first row.
  bool limits_left() const { return mask.left >= 0 && mask.left < seqlen_k - 1; }
  bool limits_right() const { return mask.right >= 0 && mask.right < seqlen_q - 1; }
  // Whether every row of a dense call sees a key. The first row sees least to the right.
  bool all_rows_see_keys() const {
    return mask.right < 0 || int64_t(seqlen_k) - seqlen_q + mask.right >= 0;
  }
  bool unmasked() const { return !limits_left() && !limits_right(); }
  bool window() const { return limits_left() && limits_right(); }
};

}  // namespace flash::plan
