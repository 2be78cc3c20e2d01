// The warpgroup that computes P: it has Q in registers, and is one tile ahead of P·V.
#pragma once

#include "decode/output.h"
#include "decode/warp_attention.h"
#include "sm90/latent/loader.h"
#include "sm90/operand.h"

namespace flash::sm90::latent {

// Where 8 columns of Q lie when its rows have been loaded: most in the last buffer for keys.
template <class Config>
__device__ typename Config::Element* query_address(LatentStorage<Config>& smem, int row,
                                                   int column) {
  return Config::Queries::address(smem.keys[Config::kStages - 1], smem.q, row, column);
}

template <class Config>
struct ScoreWarpgroup {
  using Element = typename Config::Element;
  using MmaScores = typename Config::MmaScores;
  static constexpr unsigned kAll = WarpLanes::kAll;
  static constexpr int kRows = kRowsOfThread;
  static constexpr uint32_t kShared = 0;  // a named barrier of the warpgroup
  static constexpr int kColumns = Config::kBlockN / 4;
  static constexpr bool kScaled = Config::kScores == ScoreLevel::Full;  // before the softmax
  using Work = decode::DecodeWork<Config>;
  using Position = RingPosition<Config::kStages>;
  using ScoreFragment = decltype(partition_fragment_C(
      MmaScores{}, Shape<Int<Config::kBlockM>, Int<Config::kBlockN>>{}));
  using Queries = typename Config::Queries::Fragment;

  LatentArgs const& args;
  Work const& work;
  LatentStorage<Config>& smem;
  int thread = threadIdx.x % kWarpgroup;
  FragmentCoord<1> coord{thread};
  ShiftingSoftmax softmax{(kScaled ? 1.f : params().fwd.scores.softmax_scale) * kLog2e};

  __device__ __forceinline__ void run() {
    Queries const q = Config::Queries::read(smem.keys[Config::kStages - 1], thread);
    decode::LaneRows<Config> const rows(params().fwd, work.tile, params().group, coord);
    KeyLimits const all = seen_by_all(rows);
    smem.q_ring.release(0);
    Position at(0);
    // P·V of a tile begins when S of the next is there, so that it runs under that tile's softmax,
    // and S does not share the tensor cores with it; unless keys are late.
    bool held = false;
    int before = 0;
#pragma unroll 1
    for (int key = work.begin; key < work.end; key += Config::kBlockN) {
      smem.key_ring.wait_full(at);
      ScoreFragment s_mma;
      start(q, at.stage, s_mma);
      uint32_t const exist = smem.exist[at.stage];
      bool const hides = key < all.begin || key + Config::kBlockN > all.end ||
                         exist != (uint32_t{1} << kColumns) - 1;
      warpgroup_wait<0>();
      warpgroup_fence_operand(s_mma);
      if (held) {
        announce(before);
      }
      Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
      if constexpr (kScaled) {
        decode::apply_score_mod(s, params().fwd, params().group, work.tile, rows, key, coord);
      }
      if (__any_sync(kAll, hides)) {
        hide(s, rows, key, exist);
      }
      int shift[kRows] = {};
      bool const moved = softmax.template shift_up<kColumns>(s, shift);
      softmax.template exponentials<kColumns>(s);
      // All warps' products have read the rotated columns, whose place P takes.
      cutlass::arch::NamedBarrier::sync(kWarpgroup, kShared);
      store_p<Element, Config::kBlockN>(s_mma, smem.keys[at.stage] + Config::kRotatedPlace, thread);
      smem.shifts.tell(at.stage, thread, moved, shift);
      cutlass::arch::fence_view_async_shared();
      before = at.stage;
      at.advance();
      // One test for the whole warp, without a wait: tests of its lanes may differ.
      held = key + Config::kBlockN < work.end &&
             __any_sync(kAll, smem.key_ring.full(at.stage).test_wait(at.phase));
      if (!held) {
        announce(before);
      }
    }
  }

  // Stores LSE, and tells what O has to be multiplied by.
  template <class Output>
  __device__ void finish(Output const& output) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int const row = coord.row(r);
      auto const closed = softmax.finish(r, output.sink(row), QuadReduce{});
      if (coord.col0 == 0) {
        smem.out_scale[row] = closed.out_scale;
        if (row < work.tile.rows) {
          output.store_lse(row, closed.lse);
        }
      }
    }
  }

 private:
  __device__ DecodeParams const& params() const { return args.params; }

  // Tells that P is there. All lanes of a warp call it, after a fence.
  __device__ void announce(int stage) const {
    __syncwarp();
    if (thread % 32 == 0) {
      smem.p_ring.full(stage).arrive();
    }
  }

  // The keys that all rows of this thread see.
  __device__ KeyLimits seen_by_all(decode::LaneRows<Config> const& rows) const {
    KeyLimits all{0, kUnbounded};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (coord.row(r) < work.tile.rows) {
        all = {max(all.begin, rows.keys[r].begin), min(all.end, rows.keys[r].end)};
      }
    }
    return all;
  }

  // S = Q·Kᵀ, not waited for
  __device__ __forceinline__ void start(Queries const& q, int stage, ScoreFragment& s) {
    Tensor keys = make_tensor(make_smem_ptr(smem.keys[stage]), typename Config::SmemLayoutK{});
    Tensor rest = make_tensor(make_smem_ptr(smem.q), typename Config::SmemLayoutQ{});
    auto const k = operand_b<MmaScores>(keys)(_, _, _, 0);
    auto const q_rest = operand_a<typename Config::MmaShared>(rest);
    start_scores<Config>(q, q_rest, k, s);
  }

  // Scores of keys that a row does not see, or that do not exist, become -inf.
  template <class Scores>
  __device__ void hide(Scores& s, decode::LaneRows<Config> const& rows, int key,
                       uint32_t exist) const {
    uint32_t const words[1] = {exist};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      VisibleKeys<kColumns>(rows.keys[r], key, coord, words).hide_others(s, r);
    }
  }
};

}  // namespace flash::sm90::latent
