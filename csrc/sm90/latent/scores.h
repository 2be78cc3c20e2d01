// The warpgroup that computes P: it has Q in registers, and is one tile ahead of P·V.
#pragma once

#include "decode/output.h"
#include "decode/warp_attention.h"
#include "sm90/latent/loader.h"

namespace flash::sm90::latent {

// Where 8 columns of Q lie when its rows have been loaded. Those that become registers are in the
// last buffer for keys, XORed with the row, so that ldmatrix finds eight rows in different banks;
// the others as Config::SmemLayoutQ has them, in runs of 16 columns.
template <class Config>
__device__ typename Config::Element* query_place(LatentStorage<Config>& smem, int row, int column) {
  constexpr int kStride = Config::kHeadDimV, kNarrow = 16;  // columns
  int const chunk = column / 8;
  if (column >= Config::kRegisterColumns) {
    int const run = (column - Config::kRegisterColumns) / kNarrow;
    return smem.q + (run * Config::kBlockM + row) * kNarrow + (chunk ^ row / 4) % 2 * 8;
  }
  return smem.keys[Config::kStages - 1] + row * kStride + (chunk ^ row % 8) * 8;
}

template <class Config>
struct ScoreWarpgroup {
  using Element = typename Config::Element;
  using MmaScores = typename Config::MmaScores;
  static constexpr unsigned kAll = WarpLanes::kAll;
  static constexpr int kRows = 2;         // of a thread
  static constexpr uint32_t kShared = 0;  // a named barrier of the warpgroup
  static constexpr int kColumns = Config::kBlockN / 4;
  static constexpr bool kScaled = Config::kScores == ScoreLevel::Full;  // before the softmax
  using Work = decode::DecodeWork<Config>;
  using Position = RingPosition<Config::kStages>;
  using ScoreFragment = decltype(partition_fragment_C(
      MmaScores{}, Shape<Int<Config::kBlockM>, Int<Config::kBlockN>>{}));
  // Q's first columns
  using Queries =
      decltype(make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kRegisterSteps>>{}));

  LatentArgs const& args;
  Work const& work;
  LatentStorage<Config>& smem;
  int thread = threadIdx.x % kWarpgroup;
  FragmentCoord<1> coord{thread};
  OnlineSoftmax<kRows> softmax{(kScaled ? 1.f : params().fwd.scores.softmax_scale) * kLog2e};

  __device__ Queries read_queries() const {
    Queries q;
    Tensor words = recast<uint32_t>(q);
    int const row = thread / 32 * kWarpRows + thread % kWarpRows;
    int const chunk = thread % 32 / kWarpRows;
#pragma unroll
    for (int k = 0; k < Config::kRegisterSteps; ++k) {
      Element const* const source = query_place(smem, row, (2 * k + chunk) * 8);
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(source), words(0, 0, k),
                              words(1, 0, k), words(2, 0, k), words(3, 0, k));
    }
    return q;
  }

  __device__ __forceinline__ void run() {
    Queries const q = read_queries();
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
      start_scores(q, at.stage, s_mma);
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
      bool const moved = __any_sync(kAll, softmax.template may_move<kColumns>(s)) &&
                         __any_sync(kAll, raise(s, shift));
      softmax.template exponentials<kColumns>(s);
      // All warps' products have read the rotated columns, whose place P takes.
      cutlass::arch::NamedBarrier::sync(kWarpgroup, kShared);
      store_p(s_mma, smem.keys[at.stage] + Config::kRotatedPlace);
      tell_shifts(at.stage, moved, shift);
      cutlass::arch::fence_view_async_shared();
      before = at.stage;
      at.advance();
      // Asks without waiting, for the whole warp: lanes may hear different answers.
      held = key + Config::kBlockN < work.end &&
             __any_sync(kAll, smem.key_ring.full(at.stage).test_wait(at.phase));
      if (!held) {
        announce(before);
      }
    }
  }

  // Stores LSE, and tells what O has to be multiplied by.
  __device__ void finish(decode::DecodeOutput<Config> const& output) {
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
  static constexpr int kMostShift = 255;  // 2^-255 is 0

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
  __device__ __forceinline__ void start_scores(Queries const& q, int stage, ScoreFragment& s) {
    using MmaShared = typename Config::MmaShared;
    Tensor keys = make_tensor(make_smem_ptr(smem.keys[stage]), typename Config::SmemLayoutK{});
    Tensor rest = make_tensor(make_smem_ptr(smem.q), typename Config::SmemLayoutQ{});
    auto const k = MmaScores{}.get_slice(0).partition_fragment_B(keys)(_, _, _, 0);
    auto const q_rest = MmaShared{}.get_slice(0).partition_fragment_A(rest);
    start_product<false>(MmaScores{}, q, k, s);
    warpgroup_arrive();
    MmaShared mma;
    mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
    for (int step = Config::kRegisterSteps; step < Config::kSteps; ++step) {
      cute::gemm(mma, q_rest(_, _, step - Config::kRegisterSteps), k(_, _, step), s);
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(s);
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

  // P as a tile (kBlockM, kBlockN). stmatrix takes the addresses of two eights in 16 rows from the
  // lanes.
  __device__ void store_p(ScoreFragment const& s, Element* tile) const {
    constexpr int kEights = Config::kBlockN / 8;
    static_assert(kRun<Config::kBlockN> == Config::kBlockN);
    Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
    pack<Element>(s, pairs);
    int const lane = thread % 32, own = lane / kWarpRows ^ lane % 8;
    Element* const row = tile + (thread / 32 * kWarpRows + lane % kWarpRows) * Config::kBlockN;
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
      SM90_U32x4_STSM_N::copy(pairs(0, eight), pairs(1, eight), pairs(0, eight + 1),
                              pairs(1, eight + 1),
                              *reinterpret_cast<uint128_t*>(row + (own ^ eight) * 8));
    }
  }

  // As OnlineSoftmax::raise, but in whole powers of two, which take a byte each.
  template <class Scores>
  __device__ bool raise(Scores const& s, int (&shift)[kRows]) {
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float top = softmax.max[r];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        top = fmaxf(top, s(r, c));
      }
      top = QuadReduce{}(top, Max{});
      float const growth = (top - softmax.max[r]) * softmax.scale_log2;
      if (growth > OnlineSoftmax<kRows>::kSlack) {
        // From so much on, nothing is left of what was there; then, and in the beginning, the
        // maximum is exact.
        bool const ends = growth > kMostShift;
        shift[r] = ends ? kMostShift : static_cast<int>(ceilf(growth));
        softmax.max[r] = ends ? top : softmax.max[r] + shift[r] / softmax.scale_log2;
        softmax.sum[r] *= exp2_fast(-static_cast<float>(shift[r]));
        moved = true;
      }
    }
    return moved;
  }

  // The lane that announces P stores what its warp has, so that one thread's order holds for all.
  __device__ void tell_shifts(int stage, bool moved, int const (&shift)[kRows]) const {
    int const warp = thread / 32, lane = thread % 32;
    if (moved) {
      uint8_t* const shifts = smem.shifts[stage] + warp * kWarpRows;
#pragma unroll 1
      for (int row = 0; row < kWarpRows / kRows; ++row) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          int const of_row = __shfl_sync(kAll, shift[r], 4 * row);
          if (lane == 0) {
            shifts[row + r * kWarpRows / kRows] = static_cast<uint8_t>(of_row);
          }
        }
      }
    }
    if (lane == 0) {
      smem.has_shifts[stage][warp] = moved;
    }
  }
};

}  // namespace flash::sm90::latent
