// Launches one instantiation; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include <algorithm>

#include "launch/launch_kernel.h"
#include "sm90/key_request.h"
#include "sm90/paired_forward/kernel.h"

namespace flash::sm90::forward {

template <class Config>
void launch_paired_forward(FwdParams const& params, LaunchContext const& launch) {
  constexpr int kRunColumns = kRun<Config::kHeadDim>;
  auto const runs = [](int columns) { return (columns + kRunColumns - 1) / kRunColumns; };
  int const v_runs = runs(params.head_dim_v), k_runs = std::max(runs(params.head_dim), v_runs);
  int const box_rows = box_keys(params, Config::kBlockN);
  auto const map = [&](TensorView<const void> const& view, int columns) {
    return make_tensor_map(key_request(params, view, columns, box_rows, kRun<Config::kHeadDim>));
  };
  PairedForwardArgs const args{map(params.k, params.head_dim),
                               map(params.v, params.head_dim_v),
                               box_rows,
                               k_runs,
                               v_runs,
                               params,
                               make_tile_grid(params.seqlens, params.heads_q, Config::kBlockM,
                                              {params.side_by_side, params.longest_first})};
  launch_kernel<paired_forward_kernel<Config>>(
      launch,
      {args.grid.num_tiles() * Config::kPair, Config::kThreads, kPairedSmemBytes<Config>,
       Config::kPair},
      args);
}

}  // namespace flash::sm90::forward
