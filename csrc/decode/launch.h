// Launches one instantiation; included by the generated files only.
#pragma once

#include <type_traits>

#include "decode/kernel.h"
#include "launch/counters.h"
#include "launch/largest_cluster.h"

namespace flash::decode {

constexpr int kPieceCounters = 1 << 16;
__device__ static uint32_t piece_counters[kPieceCounters];

// The counters of this file's kernels; `static`, as the array is.
static inline Counters& counters() {
  static Counters own(piece_counters);
  return own;
}

template <class Config, bool kClusters>
constexpr int kSharedMemory =
    sizeof(std::conditional_t<kClusters, ClusterStorage<Config>, DecodeStorage<Config>>);

// The call with counters that are zero, if its keys are cut. `static`, as those of the file are.
static inline DecodeParams with_counters(DecodeParams const& params, LaunchContext const& launch) {
  DecodeParams counted = params;
  int64_t const pieces = num_pieces(params.split);
  if (params.counters) {
    FLASH_CHECK_CUDA(cudaMemsetAsync(params.counters, 0, pieces * sizeof(uint32_t), launch.stream),
                     launch.name);
  } else if (params.split.max_splits > 1) {
    counted.counters = counters().of(Counting::Pieces, pieces, launch);
  }
  return counted;
}

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
