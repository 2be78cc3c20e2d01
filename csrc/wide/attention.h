// Attention of one tile of rows to the keys of one piece. Each warp computes some of the scores and
// some columns of O. The softmax needs whole rows, so every warp computes it for all rows.
#pragma once

#include "decode/warp_attention.h"
#include "wide/key_loader.h"
#include "wide/queries.h"

namespace flash::wide {

// A warp's part of the products.
template <class Config>
struct WarpPlace {
  int key;    // first of its keys of a step
  int depth;  // first of its columns of every run
  int col;    // first of its columns of O

  __device__ explicit WarpPlace(int warp)
      : key(warp % Config::kKeyWarps * 16),
        depth(warp / Config::kKeyWarps * 16),
        col(warp * Config::kWarpColumns) {}
};

// The warp's columns of Q (kBlockM, kRuns * 16) as operands. Rows that do not exist may hold
// anything, because no other row depends on them.
template <class Config>
__device__ auto read_queries(typename Config::Element const* source, WarpPlace<Config> place,
                             int lane) {
  using Element = typename Config::Element;
  Tensor q = make_tensor<Element>(Layout<Shape<_8, _1, Int<Config::kRuns>>>{});
  Tensor words = recast<uint32_t>(q);
  LanePlace const at = lanes_of_a(lane);
  Element const* const first = source + at.row * Config::kQueryStride + place.depth + at.chunk * 8;
#pragma unroll
  for (int run = 0; run < Config::kRuns; ++run) {
    Along::copy(*reinterpret_cast<uint128_t const*>(first + run * 64), words(0, 0, run),
                words(1, 0, run), words(2, 0, run), words(3, 0, run));
  }
  return q;
}

// The warp's keys as the other operand, of the columns that read_queries takes.
template <class Config>
struct KeyOperand {
  using Element = typename Config::Element;
  Element const* first;

  __device__ KeyOperand(Element const* tile, WarpPlace<Config> place, int lane) {
    LanePlace const at = lanes_of_b(lane);
    first = tile + typename Config::Tile{}(at.row + place.key, place.depth + at.chunk * 8);
  }

  // As SmemOperand's: two operands of 8 keys, 16 deep, at depth k = 16 * run.
  __device__ void read(int /*i*/, int k, uint32_t* registers) const {
    auto const* const source = first + k / 16 * (Config::kBlockN * 64);
    Along::copy(*reinterpret_cast<uint128_t const*>(source), registers[0], registers[1],
                registers[2], registers[3]);
  }
};

// Stores the warp's sums of Q·Kᵀ over its columns, for its keys.
template <class Config, class Queries>
__device__ void store_scores(Queries const& q, typename Config::Element const* tile,
                             WarpPlace<Config> place, int lane, WideStorage<Config>& smem) {
  using Grid = typename Config::Grid;
  Tensor s_mma = zeros<Grid, Config::kBlockM, 16>();
  multiply_registers<Grid>(q, KeyOperand<Config>(tile, place, lane), s_mma);
  Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
  FragmentCoord<1> const coord(lane);
  auto& sums = smem.scores[place.depth / 16];
#pragma unroll
  for (int r = 0; r < size<0>(s); ++r) {
#pragma unroll
    for (int c = 0; c < size<1>(s); c += 2) {
      *reinterpret_cast<float2*>(&sums[coord.row(r)][place.key + coord.col(c)]) = {s(r, c),
                                                                                   s(r, c + 1)};
    }
  }
}

// The scores of a step, all rows and keys: s (2, kBlockN / 4) as an accumulator's.
template <class Config, class Scores>
__device__ void read_scores(WideStorage<Config> const& smem, FragmentCoord<1> coord, Scores& s) {
#pragma unroll
  for (int r = 0; r < size<0>(s); ++r) {
#pragma unroll
    for (int c = 0; c < size<1>(s); c += 2) {
      float2 sum{0.f, 0.f};
#pragma unroll
      for (int warp = 0; warp < Config::kDepthWarps; ++warp) {
        float2 const x =
            *reinterpret_cast<float2 const*>(&smem.scores[warp][coord.row(r)][coord.col(c)]);
        sum.x += x.x;
        sum.y += x.y;
      }
      s(r, c) = sum.x;
      s(r, c + 1) = sum.y;
    }
  }
}

// A warp's columns of O, and the softmax of whole rows.
template <class Config>
struct WideAccumulators {
  static constexpr int kRows = 2;
  decltype(zeros<typename Config::Grid, Config::kBlockM, Config::kWarpColumns>()) out;
  OnlineSoftmax<kRows> softmax;

  __device__ explicit WideAccumulators(float softmax_scale) : softmax(softmax_scale * kLog2e) {
    clear(out);
  }

  __device__ auto rows() { return make_tensor(out.data(), rows_and_columns(out.layout())); }
};

// Attends to the keys of the piece.
template <class Config>
__device__ void attend(DecodeParams const& params, DecodeWork<Config> const& work,
                       WideStorage<Config>& smem, int warp, int lane,
                       WideAccumulators<Config>& acc) {
  constexpr int kN = Config::kBlockN, kStages = Config::kStages;
  FwdParams const& p = params.fwd;
  WarpPlace<Config> const place(warp);
  FragmentCoord<1> const coord(lane);
  load_queries(p, work.tile, params.group, work.tile.rows, [&](int r, int column) {
    return smem.q.data() + r * Config::kQueryStride + column;
  });
  cp_async_fence();
  WideKeyLoader<Config> tiles(p, work, smem);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    tiles.load(stage);
  }
  LaneRows<Config> const rows(p, work.tile, params.group, coord);
  cp_async_wait<kStages - 1>();  // Q
  __syncthreads();
  Tensor const q = read_queries<Config>(smem.q.data(), place, lane);
  int stage = 0;
  for (int key = work.begin, end = work.end; key < end; key += kN) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the step has arrived; all warps are done with the last one, and with Q
    tiles.load(stage > 0 ? stage - 1 : kStages - 1);
    typename Config::Element* const tile = smem.keys[stage].data();
    store_scores<Config>(q, tile, place, lane, smem);
    __syncthreads();
    Tensor s_mma = accumulators<typename Config::Grid, Config::kBlockM, kN>();
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    read_scores<Config>(smem, coord, s);
    if constexpr (Config::kScores == ScoreLevel::Full) {
      apply_score_mod(s, p, params.group, work.tile, rows, key, coord);
    }
    apply_limits(s, rows, tiles.existing(stage), key, coord);
    float rescale[2];
    acc.softmax.template step<size<1>(s)>(s, rescale, QuadReduce{});
    scale_rows(acc.rows(), rescale);
    Tensor probabilities = convert<typename Config::Element>(s_mma);
    // The warp's columns are whole runs of the tile.
    multiply_registers<typename Config::Grid>(
        make_tensor(probabilities.data(), as_operand_a(probabilities.layout())),
        operand_b<typename Config::Grid, Across, kN, Config::kWarpColumns>(
            tile + (Config::kValueBegin + place.col) * kN, lane),
        acc.out);
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  cp_async_wait<0>();
}

}  // namespace flash::wide
