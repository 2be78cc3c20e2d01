#pragma once

#include "params/gqa_split.h"
#include "params/kv_persistent.h"
#include "params/mask.h"
#include "params/ordered_dq.h"
#include "params/row_split.h"
#include "params/scores.h"
#include "params/seqlens.h"
#include "params/tensor_view.h"

namespace flash {

// Scratch memory of one backward call, in units of (head, row block); see core/row_blocks.h. The
// row block's height and the width of dq are the variant's.
struct BwdWorkspace {
  float* dq;  // [h, blocks, block_m * head_dim] sums of dQ / softmax_scale, in accumulator order;
              // null where one KV block holds all keys, and the main kernel writes dq. KV-
              // persistent: [resident, heads of a split, row_blocks, block_m * head_dim]
  float* stats;        // [h, blocks, 2, block_m] LSE in base 2, and softmax_d; +inf and 0 for rows
                       // without a key
  int* dq_semaphores;  // [h, blocks] CTAs that have added to dq, not counting the last one of
                       // ordered dQ; null unless additions have an order
  int* deltas_done;  // [h * b + 1] where delta warps compute D: for each head of each batch entry,
                     // the number of row blocks that have their D; at the end, the number of row
                     // blocks that delta warps have taken. Otherwise null
  int* order;        // [batch + 2] sequences of a KV-persistent varlen call (see VarlenRows), the
                     // longest first; null: they run in the order of their numbers
  // Gradients of each GQA split or row split; ptr null where tiles have all heads and rows, or
  // where the gradient is not wanted. They have as many columns as the variant computes.
  TensorView<float> dk;  // [b, sk, hk * splits, d], or [1, slots * block_n, 1, d] for row splits
  TensorView<float> dv;  // the same with dv columns
};

// One backward call. Element types are erased here; the variant that is picked knows them. A
// gradient whose ptr is null is not wanted.
struct BwdParams {
  TensorView<const void> q;     // [b, sq, h, d]
  TensorView<const void> k;     // [b, sk, hk, d]
  TensorView<const void> v;     // [b, sk, hk, dv]
  TensorView<const void> out;   // [b, sq, h, dv]
  TensorView<const void> dout;  // [b, sq, h, dv]
  TensorView<void> dq;          // [b, sq, h, d]
  TensorView<void> dk;          // [b, sk, hk, d]
  TensorView<void> dv;          // [b, sk, hk, dv]
  RowView lse;                  // [b, h, sq], natural log
  RowView dlse;                 // [b, h, sq] gradient of lse; ptr null: none
  RowView softmax_d;            // [b, h, sq] written: rowsum(dO * O) - dlse
  float* ds_aux;                // [h] gradient of the sinks' logits
  BwdWorkspace workspace;
  Seqlens seqlens;
  Mask mask;
  Scores scores;
  int heads_q;
  int heads_kv;
  GqaSplit gqa;
  int side_by_side;  // heads, or GQA splits, whose tiles run together
  KvPersistent kv_persistent;
  OrderedDq ordered_dq;  // not with KV-persistent or row splits
  RowSplit row_split;    // only for a dense call without GQA splits
  int head_dim;    // of q and k; at most the variant's: the rest is zero-filled in shared memory
  int head_dim_v;  // of v and out

  // Whether the main kernel writes dq for all row blocks that see some key.
  FLASH_HD bool finishes_sums() const { return kv_persistent.used() || ordered_dq.used; }
};

}  // namespace flash
