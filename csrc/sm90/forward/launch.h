// Launches one instantiation; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before whatever includes CuTe

#include <algorithm>

#include "host/launch_kernel.h"
#include "host/tile_counter.h"
#include "host/tile_order.h"
#include "sm90/forward/kernel.h"

namespace flash::sm90 {

template <class View>
TensorMap tensor_map(View const& view, int columns, int64_t rows, int heads, int batch,
                     int box_rows, int box_columns) {
  return make_tensor_map({view.ptr, columns, rows, heads, batch, view.row_stride, view.head_stride,
                          view.batch_stride, box_rows, box_columns});
}

template <class Config>
void launch_forward(FwdParams const& params, LaunchContext const& launch) {
  Seqlens const& s = params.seqlens;
  TileGrid const grid = forward_grid<Config>(params, launch.device);
  int64_t const num_tiles = grid.num_tiles();
  if (num_tiles == 0) {
    return;
  }
  check(num_tiles <= max_grid_blocks, num_tiles, " row blocks in one call, at most ",
        max_grid_blocks, " are served");
  int64_t const blocks = std::min<int64_t>(num_tiles, launch.device.sm_count);
  int const counter = num_tiles > blocks ? tile_counter(launch.stream, kTileCounters) : -1;
  int64_t const rows_q = s.cu_q ? s.total_q : s.seqlen_q;
  int64_t const rows_k = s.cu_k ? s.total_k : s.seqlen_k;
  int const batch_q = s.cu_q ? 1 : s.batch;
  int const batch_k = s.cu_k ? 1 : s.batch_k ? s.batches_k : s.batch;
  // K and V without elements may have no address.
  auto const or_q = [&](TensorView<const void> view) {
    view.ptr = view.ptr ? view.ptr : params.q.ptr;
    return view;
  };
  ForwardArgs const args{tensor_map(params.q, params.head_dim, rows_q, params.heads_q, batch_q,
                                    kWarpgroupRows, kRun<Config::kHeadDim>),
                         tensor_map(or_q(params.k), params.head_dim, rows_k, params.heads_kv,
                                    batch_k, Config::kBlockN, kRun<Config::kHeadDim>),
                         tensor_map(or_q(params.v), params.head_dim_v, rows_k, params.heads_kv,
                                    batch_k, Config::kBlockN, kRun<Config::kHeadDimV>),
                         params,
                         grid,
                         {static_cast<uint32_t>(num_tiles), counter >= 0},
                         counter};
  launch_kernel<forward_kernel<Config>>(launch, {blocks, Config::kThreads, kSmemBytes<Config>},
                                        args);
}

}  // namespace flash::sm90
