// Launches one instantiation; included by the generated files only.
#pragma once

#include <type_traits>

#include "decode/kernel.h"
#include "decode/piece_counters.h"
#include "launch/clusters.h"

namespace flash::decode {

template <class Config, bool kClusters>
constexpr int kSharedMemory =
    sizeof(std::conditional_t<kClusters, ClusterStorage<Config>, DecodeStorage<Config>>);

template <class Config, bool kClusters, bool kWritesRows>
void launch_pieces(DecodeParams const& params, LaunchContext const& launch) {
  launch_kernel<decode_kernel<Config, kClusters, kWritesRows>>(
      launch,
      {num_thread_blocks(params.split), Config::kThreads, kSharedMemory<Config, kClusters>,
       1 << params.split.cluster_log2, params.beside},
      with_counters(params, launch));
}

// Reduces clusters to the largest that this device runs. If it runs none, a CTA has a whole tile.
template <class Config, bool kWritesRows>
DecodeParams with_fitting_clusters(DecodeParams const& params, LaunchContext const& launch) {
  LaunchShape const largest{0, Config::kThreads, kSharedMemory<Config, true>,
                            1 << kMostClusterLog2};
  int const blocks = largest_cluster<decode_kernel<Config, true, kWritesRows>>(launch, largest);
  DecodeParams fitting = params;
  while (1 << fitting.split.cluster_log2 > blocks) {
    --fitting.split.cluster_log2;
  }
  return fitting;
}

template <class Config, bool kWritesRows>
void launch_tiles(DecodeParams const& params, LaunchContext const& launch) {
  if constexpr (Config::kHasClusters) {
    if (params.split.cluster_log2 > 0) {
      DecodeParams const fitting = with_fitting_clusters<Config, kWritesRows>(params, launch);
      return fitting.split.cluster_log2 > 0
                 ? launch_pieces<Config, true, kWritesRows>(fitting, launch)
                 : launch_pieces<Config, false, kWritesRows>(fitting, launch);
    }
  }
  launch_pieces<Config, false, kWritesRows>(params, launch);
}

template <class Config>
void launch_decode(DecodeParams const& params, LaunchContext const& launch) {
  if (params.rows.k_cache.ptr) {
    launch_tiles<Config, true>(params, launch);
  } else {
    launch_tiles<Config, false>(params, launch);
  }
}

}  // namespace flash::decode
