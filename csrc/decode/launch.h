// Launches one instantiation; included by the generated files only.
#pragma once

#include <type_traits>

#include "decode/fitting_clusters.h"
#include "decode/kernel.h"
#include "decode/piece_counters.h"
#include "launch/launch_kernel.h"

namespace flash::decode {

template <class Config, bool kClusters>
constexpr int kSharedMemory =
    sizeof(std::conditional_t<kClusters, ClusterStorage<Config>, DecodeStorage<Config>>);

template <class Config, bool kClusters, bool kWritesRows>
void launch_pieces(DecodeParams const& params, LaunchContext const& launch) {
  launch_kernel<decode_kernel<Config, kClusters, kWritesRows>>(
      launch,
      {num_thread_blocks(params.schedule), Config::kThreads, kSharedMemory<Config, kClusters>,
       1 << params.schedule.cluster_log2, params.beside},
      with_counters(params, launch));
}

template <class Config, bool kWritesRows>
void launch_tiles(DecodeParams const& params, LaunchContext const& launch) {
  if constexpr (Config::kHasClusters) {
    if (params.schedule.cluster_log2 > 0) {
      LaunchShape const shape{0, Config::kThreads, kSharedMemory<Config, true>};
      DecodeParams const fitting =
          with_fitting_clusters<decode_kernel<Config, true, kWritesRows>>(params, shape, launch);
      return fitting.schedule.cluster_log2 > 0
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
