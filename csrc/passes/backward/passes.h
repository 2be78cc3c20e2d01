// The kernels around the main one. They only move memory, so everything that depends on the variant
// is a number for them, and one compilation for each dtype serves all rows of the table.
#pragma once

#include <algorithm>

#include "core/tile_grid.h"
#include "launch/variant.h"

namespace flash {

// What the main kernel reads of a row block, and how its threads hold a row block's dQ (block_m,
// head_dim), and where each adds it. Warps form a grid over the rows, 16 each, and the columns. A
// thread's numbers are (2 columns, 2 rows, row tiles, eights of columns).
struct QueryTile {
  int block_m;
  int head_dim;
  int threads;
  int row_warps;
  int warp_columns;    // from a warp's first column to the next warp's
  int pair_columns;    // from one pair of a warp's eights of columns to the next
  int thread_stride;   // in the sums, from a thread's first number to the next thread's
  int element_stride;  // from one of the four numbers of (2 columns, 2 rows) to the next
  int tile_stride;     // from a row tile to the next
  int eight_stride;    // from eight columns to the next

  // log2 of the unit of probabilities: LSE is less by it, and D is divided by the unit.
  float unit_log2 = 0.f;
};

// A main kernel's tiles.
struct MainTiles {
  TileGrid grid;
  int block_n;
};

// The launches before and after a main kernel.
template <class Element>
struct Passes {
  // Before it: softmax_d, the workspace's stats, zeros in its dq and dQ semaphores.
  static void preprocess(BwdParams const& params, QueryTile tile, LaunchContext const& launch);

  // In place of preprocess, before a kernel with delta warps: computes D of `heads` heads only.
  static void begin_ordered_dq(BwdParams const& params, QueryTile tile, int heads,
                               LaunchContext const& launch);

  // After it, as far as the call needs them: dq from the sums in the workspace, dk and dv from the
  // sums of GQA splits, ds_aux from softmax_d and LSE.
  static void postprocess(BwdParams const& params, QueryTile tile, LaunchContext const& launch);

  // After it: dk and dv of tiles that are cut into row splits, from the splits' sums.
  static void add_row_splits(BwdParams const& params, MainTiles const& tiles,
                             LaunchContext const& launch);
};

// A tile per KV block and GQA split. The first KV blocks come first: most rows see them under a
// causal mask, and later ones wait for them at dQ semaphores.
inline TileGrid backward_grid(BwdParams const& params, int block_n) {
  return make_key_tile_grid(params.seqlens, params.heads_kv * params.gqa.splits, block_n,
                            {std::max(params.side_by_side, 1), /*longest_first=*/false});
}

}  // namespace flash
