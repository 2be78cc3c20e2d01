#pragma once

#include "params/mask.h"
#include "params/ordered_dq.h"
#include "params/scores.h"
#include "params/seqlens.h"
#include "params/tensor_view.h"

namespace flash {

// A CTA of a backward, or a cluster, takes all KV blocks of a sequence and GQA split, one after the
// other. All of a row's dQ then comes from the same threads, so its sums are theirs alone, and in
// L2: the first KV block stores, the others add, and the last one writes dq.
struct KvPersistent {
  int resident;    // CTAs or clusters, each with sums of its own; 0: the schedule is another one
  int row_blocks;  // of a query head; each has sums
  bool ordered;    // the longest sequence comes first

  FLASH_HD bool used() const { return resident > 0; }
};

// Which of Hopper's backward kernels have row splits. They cost d 96 1.5% of all calls and the
// others nothing (H200); kernels with score mods and of 192/128 were not timed.
constexpr bool has_row_split(int head_dim, int head_dim_v, bool plain) {
  return plain && head_dim == head_dim_v && head_dim != 96;
}

// Tiles of a backward are cut into row splits so that few tiles fill a GPU. Each split has some of
// the row blocks that see the tile's keys, and a slot in the workspace for its sums of dK and dV.
// A plan cuts all tiles; tests cut only the last ones, to have both kinds in a launch.
struct RowSplit {
  int tiles = 0;           // tiles that are cut
  int whole = 0x7fffffff;  // whole tiles before them
  int splits = 1;          // of each tile that is cut
  FastDiv by_splits;

  // whole, tiles, splits: at least 0, 1, 2
  static RowSplit last(int whole, int tiles, int splits) {
    return {tiles, whole, splits, FastDiv(splits)};
  }

  FLASH_HD bool used() const { return tiles > 0; }
  FLASH_HD int slots() const { return tiles * splits; }

  // Whole tiles are drawn first, then splits: those of a tile one after the other.
  FLASH_HD int slot_of(int drawn) const { return drawn < whole ? -1 : drawn - whole; }
  FLASH_HD int tile_of(int slot) const { return whole + by_splits.quotient(slot); }
  FLASH_HD int split_of(int slot) const {
    return by_splits.remainder(slot, by_splits.quotient(slot));
  }

  // How many of a tile's iterations come before the split's first.
  FLASH_HD int iterations_before(int split, int iterations) const {
    return by_splits.quotient(split * iterations);
  }
};

// The query heads that a backward's tile goes through, one after the other.
struct HeadsOfTile {
  int head_kv;
  int head_begin;  // the first query head
  int heads;
};

// GQA splits: the query heads of a group, cut so that each split has tiles of its own.
struct GqaSplit {
  int heads;        // of the group
  int split_heads;  // of a split; the last one may have fewer
  int splits;
  FastDiv by_splits;  // because a kernel's producer has no registers for a division

  // heads, split_heads: at least 1
  static GqaSplit of(int heads, int split_heads) {
    int const splits = (heads + split_heads - 1) / split_heads;
    return {heads, split_heads, splits, FastDiv(splits)};
  }

  // Tiles count the splits of a KV head as neighbouring heads.
  FLASH_HD HeadsOfTile heads_of(int tile_head) const {
    int const head_kv = by_splits.quotient(tile_head);
    int const begin = by_splits.remainder(tile_head, head_kv) * split_heads;
    int const left = heads - begin;
    return {head_kv, head_kv * heads + begin, left < split_heads ? left : split_heads};
  }
};

// Scratch memory of one backward call, in units of (head, row block); see core/work_tile.h. The
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
  RowView softmax_d;            // [b, h, sq] written: D
  float* ds_aux;                // [h] gradient of the sinks' logits
  BwdWorkspace workspace;
  Seqlens seqlens;
  Mask mask;
  Scores scores;
  int heads_q;
  int heads_kv;
  GqaSplit gqa;
  int side_by_side;  // KV heads, or their GQA splits, whose tiles run together
  KvPersistent kv_persistent;
  OrderedDq ordered_dq;  // not with KV-persistent or row splits
  RowSplit row_split;    // only for a dense call without GQA splits
  int head_dim;    // of q and k; at most the variant's: the rest is zero-filled in shared memory
  int head_dim_v;  // of v and out

  // Whether the main kernel writes dq for all row blocks that see some key.
  FLASH_HD bool finishes_sums() const { return kv_persistent.used() || ordered_dq.used; }
};

}  // namespace flash
