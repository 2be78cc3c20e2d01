#pragma once

#include "params/row_parts.h"
#include "params/gqa_split.h"
#include "params/kv_persistent.h"
#include "params/ordered_dq.h"
#include "params/mask.h"
#include "params/scores.h"
#include "params/seqlens.h"
#include "params/tensor_view.h"

namespace flash {

// Scratch memory of one backward call, in units of (head, row block); see core/row_blocks.h. The
// row block's height and the width of dq are the variant's.
struct BwdWorkspace {
  float* dq;     // [h, blocks, block_m * head_dim] sums of dQ / softmax_scale, accumulator order;
                 // null where one block holds all keys, and writes dq itself. In columns
                 // [places, heads of a part, row_blocks, block_m * head_dim]
  float* stats;  // [h, blocks, 2, block_m] LSE in base 2, and softmax_d; +inf and 0 where no key is
  int* turns;    // [h, blocks] thread blocks that have added to dq, but for a relay's last; null
                 // unless deterministic or a relay, and in columns
  int* found;  // [h * b + 1] of a relay that finds D: of each head of each batch entry, row blocks
               // whose D is there; and those of all of them that were taken to be found; else null
  int* order;  // [batch + 2] of a packed call in columns: sequences (see VarlenRows), the longest
               // first; null: by their number
  // Each part's gradients; ptr null where groups and tiles are whole, or where they are not wanted.
  // Of as many columns as the variant computes.
  TensorView<float> dk;  // [b, sk, hk * parts, d], or of cut tiles [1, slots * block_n, 1, d]
  TensorView<float> dv;  // the same of dv columns
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
  HeadGroup group;
  int together;  // heads, or parts of their groups, whose tiles run side by side
  KeyColumns columns;
  KeyRelay relay;  // not with columns or cut tiles
  CutTiles cut;    // only where groups are whole, and of a dense call
  int head_dim;    // of q and k; at most the variant's: the rest is zero-filled in shared memory
  int head_dim_v;  // of v and out

  // Whether the main kernel turns sums into dq, of all row blocks that it comes to.
  FLASH_HD bool finishes_sums() const { return columns.used() || relay.used; }
};

}  // namespace flash
