// Launches one instantiation and the passes around it; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before whatever includes CuTe

#include <algorithm>

#include "backward/grid.h"
#include "backward/launch.h"
#include "host/launch_kernel.h"
#include "host/tile_counter.h"
#include "sm90/backward/kernel.h"

namespace flash::sm90 {

// A tensor whose rows are those of q, or those of k.
struct Side {
  bool packed;
  int64_t rows;  // of a batch entry; of all sequences if packed
  int heads;
  int batch;
  int box_rows;
};

// Rows without elements may have no address; the keys, of which there are some, lend theirs.
template <int kColumns>
TensorMap map_of(Side const& side, TensorView<const void> const& view, int columns,
                 TensorView<const void> const& keys) {
  return make_tensor_map({view.ptr ? view.ptr : keys.ptr, columns, side.rows, side.heads,
                          side.packed ? 1 : side.batch, view.row_stride, view.head_stride,
                          view.batch_stride, side.box_rows, kRun<kColumns>,
                          side.packed ? Boxes::EndWithRow : Boxes::EndWithTensor, 1});
}

// 64 rows after the other, in the order of the accumulators of wgmma; four numbers are added at
// once.
template <class Config>
constexpr QueryTile query_tile() {
  return {.block_m = Config::kBlockM,
          .head_dim = Config::kHeadDim,
          .threads = kWarpgroup,
          .row_warps = kWarpgroup / 32,
          .warp_columns = 0,
          .group_columns = 16,
          .thread_stride = 4,
          .element_stride = 1,
          .tile_stride = kWarpgroupRows * Config::kHeadDim,
          .group_stride = 4 * kWarpgroup};
}

template <class Config>
void launch_main(BwdParams const& params, LaunchContext const& launch) {
  TileGrid const grid = backward_grid<Config>(params, launch.device);
  int64_t const num_tiles = grid.num_tiles();
  if (num_tiles == 0) {
    return;
  }
  check(num_tiles <= max_grid_blocks, num_tiles, " blocks of keys in one call, at most ",
        max_grid_blocks, " are served");
  // Who waits for turns waits for tiles before its own, which are running if blocks are launched in
  // the tiles' order. A block that stays would have skipped those that others start with.
  bool const in_turns = params.workspace.turns != nullptr;
  int64_t const blocks =
      in_turns ? num_tiles : std::min<int64_t>(num_tiles, launch.device.sm_count);
  int const counter = num_tiles > blocks ? tile_counter(launch.stream, kTileCounters) : -1;
  Seqlens const& s = params.seqlens;
  Side const rows{s.cu_q != nullptr, s.cu_q ? s.total_q : s.seqlen_q, params.heads_q, s.batch,
                  Config::kBlockM};
  Side const keys{s.cu_k != nullptr, s.cu_k ? s.total_k : s.seqlen_k, params.heads_kv, s.batch,
                  Config::kBlockN};
  BackwardArgs const args{map_of<Config::kHeadDim>(rows, params.q, params.head_dim, params.k),
                          map_of<Config::kHeadDimV>(rows, params.dout, params.head_dim_v, params.k),
                          map_of<Config::kHeadDim>(keys, params.k, params.head_dim, params.k),
                          map_of<Config::kHeadDimV>(keys, params.v, params.head_dim_v, params.k),
                          params,
                          grid,
                          {static_cast<uint32_t>(num_tiles), counter >= 0},
                          counter};
  launch_kernel<backward_kernel<Config>>(launch, {blocks, Config::kThreads, kSmemBytes<Config>},
                                         args);
}

template <class Config>
void launch_backward(BwdParams const& params, LaunchContext const& launch) {
  launch_with_passes<typename Config::Element>(params, query_tile<Config>(), launch,
                                               [&] { launch_main<Config>(params, launch); });
}

}  // namespace flash::sm90
