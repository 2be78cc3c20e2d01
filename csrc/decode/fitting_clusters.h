#pragma once

#include "core/cluster_size.h"
#include "launch/clusters.h"
#include "params/decode_params.h"

namespace flash::decode {

// Reduces clusters to the largest that this device runs. If it runs none, a CTA has a whole tile.
// shape: of the kernel that clusters run; how many CTAs it has does not matter
template <auto kKernel>
DecodeParams with_fitting_clusters(DecodeParams const& params, LaunchShape shape,
                                   LaunchContext const& launch) {
  shape.cluster = 1 << kMostClusterLog2;
  int const largest = largest_cluster<kKernel>(launch, shape);
  DecodeParams fitting = params;
  while (1 << fitting.schedule.cluster_log2 > largest) {
    --fitting.schedule.cluster_log2;
  }
  return fitting;
}

}  // namespace flash::decode
