#pragma once

#include <algorithm>

#include "params/descales.h"
#include "params/forward_tile.h"
#include "params/key_splits.h"
#include "params/mask.h"
#include "params/scores.h"
#include "params/seqlens.h"

namespace flash {

// Rows of a cache that are not whole chunks of 16 bytes, or do not begin at a multiple of them.
// Only the decode kernels with score mods read them.
struct OddRows {
  int columns_k;  // 0: all rows are whole chunks, of head_dim and head_dim_v columns
  int columns_v;

  FLASH_HD bool any() const { return columns_k > 0; }
};

// Where largest logits go, for calls that ask for those of rows or of heads.
struct MaxLogits {
  int64_t to_row = 0;         // from a row's LSE to its largest logit; 0: not wanted
  float* of_heads = nullptr;  // [h]; null: not wanted

  FLASH_HD bool wanted() const { return to_row != 0 || of_heads; }
};

// One forward call. With q_latent, keys have the values' columns too: scores are q·k + q_latent·v.
// Element types are erased here; the variant that is picked knows them.
struct FwdParams {
  TensorView<const void> q;  // [b, sq, h, d]
  TensorView<const void> k;  // [b, sk, hk, d]
  TensorView<const void> v;  // [b, sk, hk, dv]
  CodeDescales codes;
  TensorView<void> out;  // [b, sq, h, dv]
  RowView lse;           // [b, h, sq], natural log
  MaxLogits max_logits;
  Pages pages;  // of k and v, if they are [pages, page_size, hk, d]
  Seqlens seqlens;
  Mask mask;
  Scores scores;
  int heads_q;
  int heads_kv;
  int head_dim;    // of q and k; at most the variant's: the rest is zero-filled in shared memory
  int head_dim_v;  // of v and out
  bool batch_invariant;  // a sequence's result may not depend on the others' lengths
  // The plan's choice (plan/plan.h), which the decode kernel does not read.
  ForwardTile tile;
  int side_by_side;    // heads whose row blocks run together
  bool longest_first;  // the last row block of each head comes first
  KeySplits splits;
  OddRows odd;
  TensorView<const void> q_latent;  // [b, sq, h, dv], of latent attention; else ptr is null

  // Query heads of a KV head; 0 where there are none.
  int group() const { return heads_q / std::max(heads_kv, 1); }
};

}  // namespace flash
