#include <cutlass/numeric_types.h>

#include <algorithm>

#include "launch/launch_kernel.h"
#include "passes/backward/postprocess.h"
#include "passes/backward/split_sums.h"

namespace flash {
namespace {

// All heads of a row block side by side: their rows lie next to each other in memory.
TileGrid row_grid(BwdParams const& params, QueryTile tile) {
  return make_tile_grid(params.seqlens, params.heads_q, tile.block_m,
                        {std::max(params.heads_q, 1), false});
}

template <class Element>
void launch_query_gradient(BwdParams const& params, QueryTile tile, LaunchContext const& launch) {
  TileGrid const grid = row_grid(params, tile);
  if (tile.element_stride == 1) {
    launch_kernel<query_gradient_quads_kernel<Element>>(
        launch, {grid.num_tiles(), kPassThreads, 0, /*cluster=*/1, /*early=*/true}, params, tile,
        grid);
    return;
  }
  int const parts = query_gradient_parts(tile);
  int const smem_bytes = tile.block_m / parts * padded_row(tile.head_dim) * int(sizeof(Element));
  launch_kernel<query_gradient_kernel<Element>>(
      launch, {grid.num_tiles() * parts, kPassThreads, smem_bytes}, params, tile, grid);
}

template <class Element>
void launch_add_gqa_splits(BwdParams const& params, LaunchContext const& launch) {
  int64_t const blocks = (gqa_split_chunks(params) + kPassThreads - 1) / kPassThreads;
  launch_kernel<add_gqa_splits_kernel<Element>>(launch, {blocks, kPassThreads, 0}, params);
}

void launch_sink_gradient(BwdParams const& params, LaunchContext const& launch) {
  launch_kernel<sink_gradient_kernel>(
      launch, {params.heads_q, kPassThreads, kPassThreads * int(sizeof(float))}, params);
}

}  // namespace

template <class Element>
void Passes<Element>::preprocess(BwdParams const& params, QueryTile tile,
                                 LaunchContext const& launch) {
  TileGrid const grid = row_grid(params, tile);
  launch_kernel<preprocess_kernel<Element>>(launch, {grid.num_tiles(), kPassThreads, 0}, params,
                                            tile, grid);
}

template <class Element>
void Passes<Element>::begin_ordered_dq(BwdParams const& params, QueryTile tile, int heads,
                                       LaunchContext const& launch) {
  int64_t const blocks = int64_t(heads) * RowBlockOrder(params, tile.block_m).row_blocks;
  launch_kernel<begin_ordered_dq_kernel<Element>>(launch, {blocks, kPassThreads, 0}, params, tile,
                                                  heads);
}

template <class Element>
void Passes<Element>::postprocess(BwdParams const& params, QueryTile tile,
                                  LaunchContext const& launch) {
  if (params.dq.ptr && params.workspace.dq && !params.finishes_sums()) {
    launch_query_gradient<Element>(params, tile, launch);
  }
  if (params.gqa.splits > 1) {
    launch_add_gqa_splits<Element>(params, launch);
  }
  if (params.ds_aux) {
    launch_sink_gradient(params, launch);
  }
}

template <class Element>
void Passes<Element>::add_row_splits(BwdParams const& params, MainTiles const& tiles,
                                     LaunchContext const& launch) {
  int64_t const blocks = (row_split_chunks(params, tiles) + kPassThreads - 1) / kPassThreads;
  launch_kernel<add_row_splits_kernel<Element>>(launch, {blocks, kPassThreads, 0}, params, tiles);
}

template struct Passes<cutlass::bfloat16_t>;
template struct Passes<cutlass::half_t>;

}  // namespace flash
