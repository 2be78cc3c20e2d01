// The kernels around the main one. They only move memory, so everything that depends on the variant
// is a number for them, and one compilation for each dtype serves all rows of the table.
#pragma once

#include "host/variant.h"
#include "params/bwd_params.h"

namespace flash::sm80 {

// How the main kernel's threads hold a row block's dQ (block_m, head_dim): GridMma's order.
struct QueryTile {
  int block_m;
  int head_dim;
  int threads;
  int row_warps;
};

// Before: softmax_d, the workspace's stats, zeros in its dq and turns.
template <class Element>
void launch_preprocess(BwdParams const& params, QueryTile tile, LaunchContext const& launch);

// After: dq from the sums in the workspace.
template <class Element>
void launch_query_gradient(BwdParams const& params, QueryTile tile, LaunchContext const& launch);

// After: ds_aux from softmax_d and LSE.
void launch_sink_gradient(BwdParams const& params, LaunchContext const& launch);

}  // namespace flash::sm80
