// The steps of a chunk as sm80/linear/vector_steps.h has them, by wgmma: four warps multiply
// together, 64 columns of V. Their Sᵀ is the operand A, straight from its accumulators, and a tile
// of factors, which every one of four warps would read by itself, is B, which is read once.
#pragma once

#include "sm90/operand.h"  // before any other header of CuTe

#include <cutlass/arch/barrier.h>

#include "sm80/linear/vector_steps.h"

namespace flash::sm90::linear {

using namespace flash::sm80::linear;
using flash::sm80::lanes_of_a_transposed;

template <class C>
struct WarpgroupSteps {
  using Element = typename C::Element;
  // O of a warp's columns on its way to rows in memory: [tokens, columns].
  struct Storage {
    alignas(16) Element rows[C::kWarps][16 * 16];
  };

  Walk<C> const& walk;

  __device__ explicit WarpgroupSteps(Walk<C> const& walk)
      : walk(walk),
        values_at_(values_at(walk)),
        decays_at_(walk.warp_k * C::kRows + walk.lane() % 4 * 4),
        square_at_(walk.lane() / 16 * 128 + walk.lane() % 8 * 16 + walk.lane() / 8 % 2 * 8) {}

  // The run of a square of O that a lane stores.
  __device__ static RunPlace place(int lane) { return {lane / 2, lane % 2 * kRunElements}; }

  // The state alone.
  template <class Stage>
  __device__ void sum(Stage const& chunk, WalkState<C>& state) const {
    VectorKeys<C> const& keys = chunk.keys(0);
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = walk.strip_in_order(step);
      auto v = values_across(chunk.values(0), strip);
      scale(keys, strip, state);
      auto sums = of_warpgroup<C::kRows>(&state[0][0][0]);
      warpgroup_fence_operand(sums);
      warpgroup_fence_operand(v);
      warpgroup_arrive();
      start_entering(keys, strip, v, sums);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
    }
  }

  // And O but for the sums of other rows of K. O is transposed: rows are columns of V.
  template <class Stage>
  __device__ void walk_along(Stage const& chunk, WalkState<C>& state, WalkRows<C>& out) const {
    VectorFactors<C> const& factors = chunk.factors(0);
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = walk.strip_in_order(step);
      auto v = values_across(chunk.values(0), strip);
      auto own = own_values(strip, v);
      auto sums = of_warpgroup<C::kRows>(&state[0][0][0]);
      auto o = of_warpgroup<16>(&out[strip][0][0]);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        bool const last = piece == kPieces - 1;
        auto s = make_tensor<StateElement>(Shape<Shape<_2, _2, _2>, _1, Int<kPiece / 16>>{});
        auto words = recast<uint32_t>(s);
        pack<StateElement>(of_warpgroup<kPiece>(&state[0][piece * kPiece / 8][0]), words);
        if (last) {
          scale(factors.keys, strip, state);
        }
        warpgroup_fence_operand(o);
        warpgroup_fence_operand(sums);
        warpgroup_fence_operand(s);
        warpgroup_fence_operand(v);
        warpgroup_fence_operand(own);
        warpgroup_arrive();
        start_reading(factors, strip, piece, s, o);
        if (last) {
          start_own(factors, strip, own, o);
          start_entering(factors.keys, strip, v, sums);
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(sums);
        warpgroup_fence_operand(o);
      }
    }
  }

  // O's way to memory.
  template <class Stage>
  __device__ void finish(Stage const&, RowStore<C> const& target, WalkRows<C>& out,
                         Storage& storage) const {
    Element* const rows = storage.rows[threadIdx.x / 32];
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        continue;
      }
      // By eight tokens, then by eight columns of V.
      uint32_t words[4];
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        float const* const x = &out[strip][eight / 2][eight % 2 * 2];
        words[eight] = pack_pair<Element>(x[0], x[1]);
      }
      SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3],
                              *reinterpret_cast<uint128_t*>(rows + square_at_));
      __syncwarp();
      target.store(strip, 0, reinterpret_cast<uint4 const*>(rows)[walk.lane()]);
      __syncwarp();
    }
  }

 private:
  // The state becomes an operand in pieces, because registers are few beside all of it.
  static constexpr int kPiece = C::kRows < 128 ? C::kRows : 32, kPieces = C::kRows / kPiece;
  using RowsMma = MmaRegisterQueries<StateElement, 16, kPiece>;
  using OwnMma = MmaRegisterQueries<Element, 16, 16>;
  using StateMma = MmaRegisterA<Element, C::kRows, 16>;
  static_assert(C::kWarpsV % 4 == 0 && C::kHeads == 1);
  // Tiles begin where their swizzle's pattern of eight rows does.
  static constexpr int kPattern = 16 * FactorTile<C>::kRun;
  static_assert(sizeof(VectorFactors<C>::query[0]) % kPattern == 0 &&
                offsetof(VectorFactors<C>, keys) % kPattern == 0 &&
                offsetof(VectorFactors<C>, weights) % (16 * 16) == 0);

  int const values_at_;  // this lane's run of a step's V
  int const decays_at_;  // and its decays of 16 rows of the state
  int const square_at_;  // its run of a transposed square

  // A warp's accumulators as those of a product with kColumns.
  template <int kColumns>
  __device__ static auto of_warpgroup(float* registers) {
    return make_tensor(make_rmem_ptr(registers),
                       Layout<Shape<Shape<_2, _2, Int<kColumns / 8>>, _1, _1>>{});
  }
  // A tile of factors, from the warpgroup's first row of K on: its columns.
  template <class T>
  __device__ auto own_rows(T const* tile) const {
    return make_smem_ptr(tile + walk.warp_k * C::kRows * C::kChunk);
  }
  // A step's V as the operand A of a product that reduces over its tokens.
  __device__ static int values_at(Walk<C> const& walk) {
    auto const lane = lanes_of_a_transposed(walk.lane());
    return offset_in_tile<C::kV>(lane.row, lane.chunk) ^ walk.column * C::kOfWarp;
  }
  __device__ auto values_across(Element const* values, int strip) const {
    auto v = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, _1>{});
    auto words = recast<uint32_t>(v);
    SM75_U16x8_LDSM_T::copy(
        *reinterpret_cast<uint128_t const*>(values + strip * 16 * C::kV + values_at_), words(0),
        words(1), words(2), words(3));
    return v;
  }
  // Oᵀ = Sᵀ (Q∘e^G)ᵀ, of a piece's rows of K.
  template <class S, class O>
  __device__ void start_reading(VectorFactors<C> const& factors, int strip, int piece, S const& s,
                                O& o) const {
    RowsMma product;
    product.accumulate_ = piece == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    using Tile = SmemTiles<StateElement, C::kChunk, C::kRows, 1>;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      auto const rows = operand_b<RowsMma>(make_tensor(own_rows(factors.query[part]), Tile{}));
#pragma unroll
      for (int d = 0; d < kPiece / 16; ++d) {
        gemm(product, s(_, 0, d), rows(_, strip, piece * (kPiece / 16) + d, 0), o(_, 0, 0));
        product.accumulate_ = GMMA::ScaleOut::One;
      }
    }
  }
  // V where the warpgroup has the strip's sums, else zeros: ptxas serialises products in a branch.
  // An A that is infinite, which fp16 may be, becomes NaN by the zeros.
  template <class V>
  __device__ V own_values(int strip, V const& v) const {
    V own = v;
    if constexpr (C::kWarpsK > 1) {
      auto words = recast<uint32_t>(own);
#pragma unroll
      for (int i = 0; i < size(words); ++i) {
        words(i) = walk.owns(strip) ? words(i) : 0;
      }
    }
    return own;
  }
  // Oᵀ += Vᵀ Aᵀ
  template <class V, class O>
  __device__ void start_own(VectorFactors<C> const& factors, int strip, V const& v, O& o) const {
    auto const weights = operand_b<OwnMma>(
        make_tensor(make_smem_ptr(&factors.weights[strip][0]), SmemTiles<Element, 16, 16, 1>{}));
    OwnMma product;
    product.accumulate_ = GMMA::ScaleOut::One;
    gemm(product, v(_, 0, 0), weights(_, 0, 0, 0), o(_, 0, 0));
  }
  // Sᵀ += Vᵀ (K∘e^(G_16 − G))
  template <class V, class Sums>
  __device__ void start_entering(VectorKeys<C> const& keys, int strip, V const& v,
                                 Sums& sums) const {
    using Tile = SmemTilesTransposed<Element, C::kChunk, C::kRows, 1>;
    auto const rows = operand_b<StateMma>(make_tensor(own_rows(&keys.rows[0]), Tile{}));
    StateMma product;
    product.accumulate_ = GMMA::ScaleOut::One;
    gemm(product, v(_, 0, 0), rows(_, 0, strip, 0), sums(_, 0, 0));
  }
  // What is left of the state after a step.
  __device__ void scale(VectorKeys<C> const& keys, int strip, WalkState<C>& state) const {
#pragma unroll
    for (int row = 0; row < C::kRows; row += 16) {
      auto const& left = *reinterpret_cast<float4 const*>(&keys.decays[strip][decays_at_ + row]);
      decay_rows(left, state[0][row / 8], state[0][row / 8 + 1]);
    }
  }
};

// A tiling whose warps along V are warpgroups.
template <class Element, int kTiling, flash::linear::Order kOrder>
struct WarpgroupConfig : VectorConfig<Element, kTiling, kOrder> {
  using Steps = WarpgroupSteps<WarpgroupConfig>;
  static constexpr int kStageAlignment = 1024;  // of the swizzle's pattern
  // What this thread wrote to shared memory, or cp.async for it, is there for wgmma after this, and
  // a barrier.
  __device__ static void let_products_see_writes() { cutlass::arch::fence_view_async_shared(); }
  // The shuffle tells the compiler that all lanes have the same number, so that addresses made of
  // it stay in uniform registers, where wgmma wants them.
  __device__ static int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }
};

}  // namespace flash::sm90::linear
