// Parts of a warpgroup that computes P for others, which have O: Q in registers, the softmax, and P
// and what O has to be multiplied by in shared memory.
#pragma once

#include "core/fragment_coord.h"
#include "core/softmax.h"
#include "core/warp_lanes.h"
#include "sm90/tensor_core.h"

namespace flash::sm90 {

// Q's first kSteps * 16 columns as operands of a warpgroup's products, and where 8 columns of Q lie
// before: these in `tile`, rows kStride elements apart and XORed with the row, so that ldmatrix
// finds eight rows in different banks; the others, which stay in shared memory, in runs of 16
// columns in `rest`, as GMMA::Layout_K_SW32_Atom has them.
template <class Element_, int kSteps_, int kStride>
struct RegisterQueries {
  using Element = Element_;
  using Fragment = decltype(make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<kSteps_>>{}));
  static constexpr int kSteps = kSteps_, kColumns = kSteps * 16;

  __device__ static Element* address(Element* tile, Element* rest, int row, int column) {
    constexpr int kNarrow = 16;  // columns
    int const chunk = column / 8;
    if (column >= kColumns) {
      int const run = (column - kColumns) / kNarrow;
      return rest + (run * kWarpgroupRows + row) * kNarrow + (chunk ^ row / 4) % 2 * 8;
    }
    return tile + row * kStride + (chunk ^ row % 8) * 8;
  }

  __device__ static Fragment read(Element* tile, int thread) {
    Fragment q;
    Tensor words = recast<uint32_t>(q);
    int const row = thread / 32 * kWarpRows + thread % kWarpRows;
    int const chunk = thread % 32 / kWarpRows;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Element const* const source = address(tile, nullptr, row, (2 * k + chunk) * 8);
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(source), words(0, 0, k),
                              words(1, 0, k), words(2, 0, k), words(3, 0, k));
    }
    return q;
  }
};

// Starts S = Q·Kᵀ, with the first columns of Q in registers. q_rest, k: operands in shared memory
template <class Config, class Queries, class QueryRest, class Keys, class Scores>
__device__ __forceinline__ void start_scores(Queries const& q, QueryRest const& q_rest,
                                             Keys const& k, Scores& s) {
  constexpr int kRegisterSteps = decltype(size<2>(q))::value;
  start_product<false>(typename Config::MmaScores{}, q, k, s);
  warpgroup_arrive();
  typename Config::MmaShared mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
  for (int step = kRegisterSteps; step < size<2>(k); ++step) {
    cute::gemm(mma, q_rest(_, _, step - kRegisterSteps), k(_, _, step), s);
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(s);
}

constexpr int kRowsOfThread = 2;

// A softmax whose maxima grow by whole powers of two: what O has to be multiplied by then is exact,
// and takes a byte a row.
struct ShiftingSoftmax : OnlineSoftmax<kRowsOfThread> {
  using OnlineSoftmax::OnlineSoftmax;
  static constexpr int kMostShift = 255;  // 2^-255 is 0

  // Raises the maxima if the scores exceed them by far. shift: log2 of what O is to be divided by
  template <int kColumns, class Scores>
  __device__ bool shift_up(Scores const& s, int (&shift)[kRowsOfThread]) {
    bool const moves = __any_sync(WarpLanes::kAll, this->template may_move<kColumns>(s));
    return moves && __any_sync(WarpLanes::kAll, raise_rows<kColumns>(s, shift));
  }

 private:
  template <int kColumns, class Scores>
  __device__ bool raise_rows(Scores const& s, int (&shift)[kRowsOfThread]) {
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      float top = max[r];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        top = fmaxf(top, s(r, c));
      }
      top = QuadReduce{}(top, Max{});
      float const growth = (top - max[r]) * scale_log2;
      if (growth > kSlack) {
        // From so much on, nothing is left of what was there; then, and in the beginning, the
        // maximum is exact.
        bool const ends = growth > kMostShift;
        shift[r] = ends ? kMostShift : static_cast<int>(ceilf(growth));
        max[r] = ends ? top : max[r] + shift[r] / scale_log2;
        sum[r] *= exp2_fast(-static_cast<float>(shift[r]));
        moved = true;
      }
    }
    return moved;
  }
};

// O has to be multiplied by 2^-shift before a tile's P·V. A warp's rows have shifts only where
// has_shifts says so. kBuffers: as many as there are for P
template <int kBuffers>
struct RowShifts {
  uint8_t shifts[kBuffers][kWarpgroupRows];
  bool has_shifts[kBuffers][kWarpgroupRows / kWarpRows];

  // The lane that announces P stores what its warp has, so that one thread's order holds for all.
  __device__ void tell(int buffer, int thread, bool moved, int const (&shift)[kRowsOfThread]) {
    int const warp = thread / 32, lane = thread % 32;
    if (moved) {
      uint8_t* const own = shifts[buffer] + warp * kWarpRows;
#pragma unroll 1
      for (int row = 0; row < kWarpRows / kRowsOfThread; ++row) {
#pragma unroll
        for (int r = 0; r < kRowsOfThread; ++r) {
          int const of_row = __shfl_sync(WarpLanes::kAll, shift[r], 4 * row);
          if (lane == 0) {
            own[row + r * kWarpRows / kRowsOfThread] = static_cast<uint8_t>(of_row);
          }
        }
      }
    }
    if (lane == 0) {
      has_shifts[buffer][warp] = moved;
    }
  }

  // Multiplies a thread's accumulators, seen as (rows, columns).
  template <class Rows>
  __device__ void apply(int buffer, int thread, FragmentCoord<1> coord, Rows rows) const {
    if (has_shifts[buffer][thread / 32]) {
      float const factor[kRowsOfThread] = {
          exp2_fast(-static_cast<float>(shifts[buffer][coord.row(0)])),
          exp2_fast(-static_cast<float>(shifts[buffer][coord.row(1)]))};
      scale_rows(rows, factor);
    }
  }
};

// P as a tile (64, kColumns). stmatrix takes the addresses of two eights in 16 rows from the lanes.
template <class Element, int kColumns, class Scores>
__device__ void store_p(Scores const& s, Element* tile, int thread) {
  constexpr int kEights = kColumns / 8;
  static_assert(kRun<kColumns> == kColumns);
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
  pack<Element>(s, pairs);
  int const lane = thread % 32, own = lane / kWarpRows ^ lane % 8;
  Element* const row = tile + (thread / 32 * kWarpRows + lane % kWarpRows) * kColumns;
#pragma unroll
  for (int eight = 0; eight < kEights; eight += 2) {
    SM90_U32x4_STSM_N::copy(pairs(0, eight), pairs(1, eight), pairs(0, eight + 1),
                            pairs(1, eight + 1),
                            *reinterpret_cast<uint128_t*>(row + (own ^ eight) * 8));
  }
}

}  // namespace flash::sm90
