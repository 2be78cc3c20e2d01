// The pass before a kernel whose delta warps compute D: clears the dQ semaphores, and computes D of
// the heads that tiles reach first.
#pragma once

#include "passes/backward/preprocess.h"
#include "passes/backward/row_block_order.h"

namespace flash {

// first: heads, of all batch entries, whose D is computed here, one row block by each CTA.
template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    begin_ordered_dq_kernel(__grid_constant__ BwdParams const p,
                            __grid_constant__ QueryTile const shape, int first) {
  let_next_launch_start();
  RowBlockOrder const order(p, shape.block_m);
  BwdWorkspace const& w = p.workspace;
  int const thread = static_cast<int>(blockIdx.x * kPassThreads + threadIdx.x);
  int const threads = static_cast<int>(gridDim.x * kPassThreads);
  for (int i = thread; i < order.count(); i += threads) {
    w.dq_semaphores[i] = 0;
  }
  for (int i = thread; i < order.all_heads(); i += threads) {
    w.deltas_done[i] = i < first ? order.row_blocks : 0;
  }
  if (thread == 0) {
    w.deltas_done[order.all_heads()] = first * order.row_blocks;
  }
  WorkTile const tile = order.at(static_cast<int>(blockIdx.x));
  if (tile.valid) {
    find_rows<Element>(p, shape, tile, BlockInfo(p.seqlens, tile.batch), order.place(tile), true);
  }
}

}  // namespace flash
