// Launches one instantiation; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "decode/fitting_clusters.h"
#include "launch/launch_kernel.h"
#include "sm90/key_request.h"
#include "sm90/latent/kernel.h"
#include "sm90/latent/merge.h"

namespace flash::sm90::latent {

template <class Config>
void launch_decode(DecodeParams const& params, LaunchContext const& launch) {
  static_assert(kSmemBytes<Config> <= kMostSmem);
  FwdParams const& p = params.fwd;
  int const box_rows = box_keys(p, Config::kBlockN);
  auto const map = [&](TensorView<const void> const& view, int columns) {
    // A cache without rows may have no address.
    return make_tensor_map(
        key_request(p, view.ptr ? view : p.q_latent, columns, box_rows, kRun<Config::kColumns>));
  };
  // Boxes beyond V's last column are zeros.
  bool const rotated = p.head_dim > 0;
  LatentArgs args{rotated ? map(p.k, p.head_dim) : map(p.v, p.head_dim_v), map(p.v, p.head_dim_v),
                  rotated ? 0 : Config::kHeadDimV, box_rows, params};
  LaunchShape shape{num_pieces(params.schedule), Config::kThreads, kSmemBytes<Config>};
  if (params.schedule.cluster_log2 > 0) {
    constexpr auto kKernel = latent_kernel<Config, true>;
    args.params = decode::with_fitting_clusters<kKernel>(params, shape, launch);
    shape.blocks = num_thread_blocks(args.params.schedule);
    shape.cluster = 1 << args.params.schedule.cluster_log2;
    return launch_kernel<kKernel>(launch, shape, args);
  }
  launch_kernel<latent_kernel<Config, false>>(launch, shape, args);
  if (params.schedule.max_pieces > 1) {
    launch_kernel<merge_kernel<Config>>(
        launch,
        {shape.blocks, kMergeThreads, sizeof(MergeStorage<Config>), /*cluster=*/1, /*early=*/true},
        params);
  }
}

}  // namespace flash::sm90::latent
