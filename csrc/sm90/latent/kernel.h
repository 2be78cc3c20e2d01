// Latent attention (MLA, DeepSeek-AI 2024, arXiv:2405.04434) for Hopper: one warpgroup computes P
// of 64 rows, two others half of O's 512 columns each. Work is cut as decode's (decode/kernel.h);
// clusters merge as there, pieces in a launch of their own (merge.h).
#pragma once

#include "sm90/latent/scores.h"
#include "sm90/latent/values.h"

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "decode/find_work.h"
#include "wide/queries.h"
#include "wide/store.h"

namespace flash::sm90::latent {

constexpr uint32_t kKeysRead = 1;  // a named barrier

// Where a CTA of a cluster leaves a row's LSE until all of them have read their keys.
template <class Config>
struct OwnLse {
  LatentStorage<Config>& smem;

  __device__ float sink(int /*row*/) const { return -INFINITY; }  // the merged row has it
  __device__ void store_lse(int row, float lse) const { smem.lse[row] = lse; }
};

template <class Config>
__device__ void send_lse(decode::DecodeWork<Config> const& work, decode::PieceShare const& share,
                         LatentStorage<Config>& smem) {
  int const row = threadIdx.x;
  if (row < work.tile.rows) {
    decode::InboxPlace const to(share, row);
    to.block.write(smem.inbox.lse[to.index], smem.lse[row]);
  }
}

// Attends to the keys of the piece. Afterwards O lies in shared memory, not yet scaled; or, in a
// cluster, all CTAs have sent their rows, which are there after the cluster's next barrier.
template <bool kClusters, class Config>
__device__ __forceinline__ void attend(LatentArgs const& args, decode::PieceShare const& share,
                                       decode::DecodeOutput<Config> const& output,
                                       LatentStorage<Config>& smem) {
  using cutlass::arch::warpgroup_reg_alloc, cutlass::arch::warpgroup_reg_dealloc;
  decode::DecodeWork<Config> const& work = output.work;
  // The shuffle tells the compiler that this is the same in all lanes.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  // Most of Q lies in the last buffer until it is in registers; the others are filled
  // meanwhile.
  if (threadIdx.x < 32) {
    KeyLoader<Config> const loader{args, work, smem};
    for (int tile = 0; tile < Config::kStages - 1; ++tile) {
      loader.load(tile, loader.look_up(tile));
    }
  }
  flash::wide::load_queries(args.params.fwd, work.tile, args.params.group, Config::kBlockM,
                            [&](int r, int column) { return query_address(smem, r, column); });
  cp_async_fence();
  cp_async_wait<0>();
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kScoreRegisters>();
    ScoreWarpgroup<Config> scores{args, work, smem};
    scores.run();
    if constexpr (kClusters) {
      scores.finish(OwnLse<Config>{smem});
      sync_cluster();
      send_lse(work, share, smem);
    } else {
      scores.finish(output);
    }
    // setmaxnreg needs all warps to be past the one before: without keys, and without a cluster,
    // nothing else has waited.
    cutlass::arch::NamedBarrier::sync(kWarpgroup, ScoreWarpgroup<Config>::kShared);
    warpgroup_reg_dealloc<Config::kAllRegisters>();
  } else {
    warpgroup_reg_dealloc<Config::kValueRegisters>();
    ValueWarpgroup<Config> values{args, work, smem, warpgroup - 1};
    values.run();
    if constexpr (kClusters) {
      sync_cluster();
      values.send(share);
    } else {
      // O takes the keys' place.
      cutlass::arch::NamedBarrier::sync(Config::kValueWarpgroups * kWarpgroup, kKeysRead);
      values.store();
    }
    smem.q_ring.empty(0).wait(0);  // not before the first warpgroup has what it needs
    warpgroup_reg_alloc<Config::kAllRegisters>();
  }
}

template <bool kClusters, class Config>
__device__ __forceinline__ void latent_piece(LatentArgs const& args) {
  decode::PieceShare const share{kClusters ? args.params.schedule.cluster_log2 : 0};
  auto& smem = *reinterpret_cast<LatentStorage<Config>*>(dynamic_smem());
  auto& work = *reinterpret_cast<decode::DecodeWork<Config>*>(smem.work);
  let_next_launch_start();
  if (threadIdx.x < 32) {
    decode::find_work(args.params, share, work);
  } else if (threadIdx.x == 32) {
    prefetch_tma_descriptor(&args.v.map);
    prefetch_tma_descriptor(&args.k.map);
    smem.init();
  }
  __syncthreads();
  if (!work.piece.valid) {  // in all CTAs of a cluster
    return;
  }
  using Output = decode::DecodeOutput<Config>;
  bool const cut = !kClusters && work.piece.count > 1;
  Output const output{args.params, work, cut ? work.piece.number : Output::kWhole};
  attend<kClusters>(args, share, output, smem);
  if constexpr (kClusters) {
    sync_cluster();
    decode::merge_inbox(output, share, smem.inbox);
  } else {
    __syncthreads();
    flash::wide::store_out(output, smem.out, [&](int row) { return smem.out_scale[row]; });
  }
}

// kClusters: a cluster of CTAs has a tile, and merges it through each other's shared memory.
template <class Config, bool kClusters>
__global__ void __launch_bounds__(Config::kThreads, 1)
    latent_kernel(__grid_constant__ LatentArgs const args) {
  static_assert(kSparesQueries<Config>);
  latent_piece<kClusters, Config>(args);
}

}  // namespace flash::sm90::latent
