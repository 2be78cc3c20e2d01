// Attention of few query rows against many keys, where only reading the keys takes time. A CTA
// computes one tile of pack-GQA rows against one piece of the keys, and each of its warps has keys
// of its own (Flash-Decoding, with keys split inside the CTA as well). The last CTA of a tile
// merges the pieces. On Hopper a cluster of CTAs may have the tile.
#pragma once

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "decode/cluster_merge.h"
#include "decode/find_work.h"
#include "decode/piece_merge.h"

namespace flash::decode {

// Registers have to allow so many CTAs an SM. With clusters it is two, so that a thread
// may have 255 registers.
template <bool kClusters>
constexpr int kDecodeBlocks = kClusters ? kMostClusterBlocks : kMostDecodeBlocks;

template <class Config, bool kClusters, bool kWritesRows>
__device__ __forceinline__ void decode_piece(DecodeParams const& p) {
  PieceShare const share{kClusters ? p.schedule.cluster_log2 : 0};
  auto& smem = *reinterpret_cast<DecodeStorage<Config>*>(dynamic_smem());
  auto& work = *reinterpret_cast<DecodeWork<Config>*>(smem.work);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kClusters) {
    announce_to_cluster();
  }
  if (warp == 0) {
    find_work(p, share, work);
  }
  __syncthreads();
  if (!work.piece.valid) {
    if constexpr (kClusters) {
      wait_for_cluster();
    }
    return;
  }
  // With score mods, scores are scaled before the softmax.
  constexpr bool kScaled = Config::kScores == ScoreLevel::Full;
  WarpAccumulators<Config> acc(kScaled ? 1.f : p.fwd.scores.softmax_scale);
  attend<kWritesRows>(p, work, smem, warp, lane, acc);
  using Output = DecodeOutput<Config>;
  if constexpr (kClusters) {
    auto& inbox = reinterpret_cast<ClusterStorage<Config>*>(dynamic_smem())->inbox;
    merge_and_store(SentOutput<Config>{p, work, share, inbox}, smem.merge, warp, lane, acc);
    sync_cluster();
    merge_inbox(Output{p, work, Output::kWhole}, share, inbox);
  } else {
    bool const cut = work.piece.count > 1;
    Output const output{p, work, cut ? work.piece.number : Output::kWhole};
    merge_and_store(output, smem.merge, warp, lane, acc);
    if (cut) {
      merge_pieces(p, work, smem.pieces);
    }
  }
}

// Clusters and calls with new rows have kernels of their own: code that a call does not need costs
// time to skip, and registers.
template <class Config, bool kClusters, bool kWritesRows>
__global__ void __launch_bounds__(Config::kThreads, kDecodeBlocks<kClusters>)
    decode_kernel(__grid_constant__ DecodeParams const p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr bool kRuns = !kClusters;
#else
  constexpr bool kRuns = true;
#endif
  if constexpr (kRuns) {
    decode_piece<Config, kClusters, kWritesRows>(p);
    if (blockIdx.x == gridDim.x - 1) {
      wait_for_launch_before();  // because later launches wait for this one alone
    }
  }
}

}  // namespace flash::decode
