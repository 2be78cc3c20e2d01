// The two matrix products of one warp: S = Q·Kᵀ and O += P·V.
#pragma once

#include "sm80/decode/config.h"
#include "sm80/decode/packed_rows.h"

namespace flash::sm80 {

// Q (kBlockM, kHeadDim) as operands, straight from global memory: every warp needs all of it, and
// the first keys are on their way meanwhile. Rows and columns that do not exist are zero.
template <class Config>
__device__ auto load_queries(FwdParams const& p, DecodeTile<Config> const& tile,
                             FastDiv const& group, int lane) {
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kD = Config::kHeadDim;
  typename Config::TiledMma mma;
  Tensor q = make_tensor<Element>(partition_shape_A(mma, Shape<Int<kM>, Int<kD>>{}));
  Tensor words = recast<uint32_t>(q);  // ((1, 2 rows, 2 halves of 16 columns), 1, kD / 16)
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const tile_row = lane / 4 + 8 * r;
    bool const row_exists = tile_row < tile.rows;
    QueryRow const row = tile.row(group, tile_row);
    Element const* const source = static_cast<Element const*>(p.q.ptr) +
                                  p.q.offset(tile.sequence, tile.info.row_q + row.query, row.head);
#pragma unroll
    for (int chunk = 0; chunk < kD / 8; ++chunk) {
      int const col = chunk * 8 + lane % 4 * 2;
      bool const exists = row_exists && col < p.head_dim;
      words(make_coord(_0{}, r, chunk % 2), _0{}, chunk / 2) =
          exists ? *reinterpret_cast<uint32_t const*>(source + col) : 0u;
    }
  }
  return q;
}

// S = Q·Kᵀ (kBlockM, kBlockN)
template <class Config, class Queries>
__device__ auto scores(Queries const& q, typename Config::Element* k, int lane) {
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kHeadDim;
  typename Config::TiledMma mma;
  Tensor s = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});
  clear(s);
  Tensor sK = make_tensor(make_smem_ptr(k), typename Config::SmemLayoutK{});
  Tensor rK = make_tensor<Element>(partition_shape_B(mma, Shape<Int<kN>, Int<kD>>{}));
  auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto thread_k = copy_k.get_slice(lane);
  Tensor from_k = thread_k.partition_S(sK);
  Tensor to_k = thread_k.retile_D(rK);
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    copy(copy_k, from_k(_, _, step), to_k(_, _, step));
    gemm(mma, q(_, _, step), rK(_, _, step), s);
  }
  return s;
}

// O += P·V, P already in operand registers (MMA, 1, kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(OperandP const& p, typename Config::Element* v, int lane, Out& out) {
  using Element = typename Config::Element;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDimV;
  typename Config::TiledMma mma;
  Tensor sVt = make_tensor(make_smem_ptr(v), typename Config::SmemLayoutVt{});
  Tensor rV = make_tensor<Element>(partition_shape_B(mma, Shape<Int<kD>, Int<kN>>{}));
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
  auto thread_v = copy_v.get_slice(lane);
  Tensor from_v = thread_v.partition_S(sVt);
  Tensor to_v = thread_v.retile_D(rV);
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    copy(copy_v, from_v(_, _, step), to_v(_, _, step));
    gemm(mma, p(_, _, step), rV(_, _, step), out);
  }
}

}  // namespace flash::sm80
