// Launches one instantiation; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include "launch/clusters.h"
#include "sm90/key_request.h"
#include "sm90/latent/kernel.h"
#include "sm90/latent/merge.h"

namespace flash::sm90::latent {

// By the largest clusters up to those of the plan that this device runs. shape: with a CTA for each
// tile
template <class Config>
void launch_clusters(LatentArgs args, LaunchShape shape, LaunchContext const& launch) {
  constexpr auto kKernel = latent_kernel<Config, true>;
  shape.cluster = 1 << kMostClusterLog2;
  int const largest = largest_cluster<kKernel>(launch, shape);
  int& log2 = args.params.split.cluster_log2;
  while (1 << log2 > largest) {
    --log2;
  }
  shape.cluster = 1 << log2;
  shape.blocks *= shape.cluster;
  launch_kernel<kKernel>(launch, shape, args);
}

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
  // Boxes behind V's last column are zeros.
  bool const rotated = p.head_dim > 0;
  LatentArgs const args{rotated ? map(p.k, p.head_dim) : map(p.v, p.head_dim_v),
                        map(p.v, p.head_dim_v), rotated ? 0 : Config::kHeadDimV, box_rows, params};
  LaunchShape shape{num_pieces(params.split), Config::kThreads, kSmemBytes<Config>};
  if (params.split.cluster_log2 > 0) {
    return launch_clusters<Config>(args, shape, launch);
  }
  launch_kernel<latent_kernel<Config, false>>(launch, shape, args);
  if (params.split.max_splits > 1) {
    launch_kernel<merge_kernel<Config>>(
        launch,
        {shape.blocks, kMergeThreads, sizeof(MergeStorage<Config>), /*cluster=*/1, /*early=*/true},
        params);
  }
}

}  // namespace flash::sm90::latent
