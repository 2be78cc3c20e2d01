// The warpgroup that computes P: it has Q in registers, and is one KV block ahead of P·V.
#pragma once

#include "core/score_fragments.h"
#include "sm90/operand.h"
#include "sm90/paired_forward/config.h"

namespace flash::sm90::forward {

template <class Config>
struct PairedScoreWarpgroup {
  using Element = typename Config::Element;
  using MmaScores = typename Config::MmaScores;
  static constexpr int kColumns = Config::kBlockN / 4;  // of a thread
  using ScoreFragment = decltype(partition_fragment_C(
      MmaScores{}, Shape<Int<Config::kRows>, Int<Config::kBlockN>>{}));
  using Queries = typename Config::Queries::Fragment;
  using TilePosition = RingPosition<Config::kStages>;
  using ProbabilityPosition = RingPosition<Config::kProbabilityStages>;

  PairedForwardArgs const& args;
  PairedRowBlock<Config> const& block;
  PairedForwardStorage<Config>& smem;
  int thread = threadIdx.x % kWarpgroup;
  FragmentCoord<4> coord{thread};
  ShiftingSoftmax softmax{args.params.scores.softmax_scale * kLog2e};

  __device__ __forceinline__ void run() {
    int const steps = block.range.count();
    Queries const q = Config::Queries::read(smem.tiles[Config::kStages - 1], thread);
    if (args.k_runs * kRun<Config::kHeadDim> < Config::kHeadDim) {
      sync();  // all warps have read Q
      smem.clear_columns(Config::kStages - 1, args.k_runs, thread, kWarpgroup);
      cutlass::arch::fence_view_async_shared();
      sync();
    }
    smem.release_queries();
    // P·V of a block begins when S of the next is there, so that it runs under that block's
    // softmax, and S does not share the tensor cores with it; unless keys are late.
    bool held = false;
    int key_block = block.range.block_at(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      TilePosition const at(LoadOrder::key(step));
      ProbabilityPosition const p_at(step);
      smem.tile_ring.wait_full(at);
      ScoreFragment s_mma;
      start(q, at.stage, s_mma);
      warpgroup_wait<0>();
      warpgroup_fence_operand(s_mma);
      uint32_t const exist[1] = {smem.exist[at.stage]};
      smem.release_keys(at.stage);
      if (held) {
        announce(step - 1);
      }
      Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
      if (block.range.masked(key_block) || exist[0] != smem.kAllKeys) {
        auto const query_of = [&](int row) { return block.row_begin + row; };
        apply_mask(s, block.mask, query_of, key_block * Config::kBlockN, coord, exist);
      }
      int shift[kRowsOfThread] = {};
      bool const moved = softmax.template shift_up<kColumns>(s, shift);
      softmax.template exponentials<kColumns>(s);
      smem.p_ring.wait_empty(p_at);
      store_p<Element, Config::kBlockN>(s_mma, smem.p[p_at.stage], thread);
      smem.shifts.tell(p_at.stage, thread, moved, shift);
      cutlass::arch::fence_view_async_shared();
      key_block = block.range.after(key_block);
      // One test for the whole warp, without a wait: tests of its lanes may differ.
      TilePosition const next(LoadOrder::key(step + 1));
      held = step + 1 < steps &&
             __any_sync(WarpLanes::kAll, smem.tile_ring.full(next.stage).test_wait(next.phase));
      if (!held) {
        announce(step);
      }
    }
  }

  // Stores LSE, and tells what O has to be multiplied by.
  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      int const row = coord.row(r);
      auto const finished = softmax.finish(r, block.sink, QuadReduce{});
      if (thread % 4 == 0) {
        smem.out_scale[row] = finished.out_scale;
        if (row < block.rows) {
          block.lse[row] = finished.lse;
        }
      }
    }
    if (thread % 4 == 0) {  // each thread announces its own rows
      smem.end_ring.full(0).arrive();
    }
  }

 private:
  __device__ void sync() const { cutlass::arch::NamedBarrier::sync(kWarpgroup, 0); }

  // S = Q·Kᵀ, not waited for
  __device__ __forceinline__ void start(Queries const& q, int stage, ScoreFragment& s) {
    Tensor keys = make_tensor(make_smem_ptr(smem.tiles[stage]), typename Config::SmemLayoutK{});
    Tensor rest = make_tensor(make_smem_ptr(smem.q), typename Config::SmemLayoutQ{});
    auto const k = operand_b<MmaScores>(keys)(_, _, _, 0);
    auto const q_rest = operand_a<typename Config::MmaShared>(rest);
    start_scores<Config>(q, q_rest, k, s);
  }

  // Tells that P is there. All lanes of a warp call it, after a fence.
  __device__ void announce(int step) const {
    __syncwarp();
    if (thread % 32 == 0) {
      smem.p_ring.full(ProbabilityPosition(step).stage).arrive();
    }
  }
};

}  // namespace flash::sm90::forward
