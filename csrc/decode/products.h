// The two matrix products of one warp: S = Q·Kᵀ and O += P·V.
#pragma once

#include "decode/code_queries.h"
#include "decode/tile_rows.h"
#include "sm80/products.h"

namespace flash::decode {

// Copies the tile's rows to shared memory, by all threads, as one cp.async group of each thread.
// Columns beyond the head's become zero.
template <class Config>
__device__ void copy_queries(FwdParams const& p, DecodeTile<Config> const& tile,
                             FastDiv const& group, typename Config::Element* target) {
  using Element = typename Config::Element;
  using CopyOp = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;
  constexpr int kChunks = Config::kHeadDim / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < tile.rows * kChunks; i += Config::kThreads) {
    int const r = i / kChunks, col = i % kChunks * 8;
    QueryRow const row = tile.row(group, r);
    Element const* const source = static_cast<Element const*>(p.q.ptr) +
                                  p.q.offset(tile.sequence, tile.info.row_q + row.query, row.head) +
                                  col;
    CopyOp::copy(*reinterpret_cast<uint128_t const*>(source),
                 *reinterpret_cast<uint128_t*>(target + r * Config::kQueryStride + col),
                 col < p.head_dim);
  }
  cp_async_fence();
}

// Q (kBlockM, kHeadDim) as operands: every warp needs all of it. Rows that do not exist may hold
// anything, because no other row depends on them.
template <class Config>
__device__ auto read_queries(typename Config::Element* source, int lane) {
  using Operand = typename Config::Operand;
  constexpr int kSteps = Config::kHeadDim / 16;
  auto const* const tile = reinterpret_cast<Operand const*>(source);
  Tensor q = make_tensor<Operand>(Layout<Shape<_8, _1, Int<kSteps>>>{});
  Tensor words = recast<uint32_t>(q);
  if constexpr (Config::kCodes) {
    read_queries_for_codes<Config::kQueryStride>(tile, lane, words);
    return q;
  }
  LanePlace const place = lanes_of_a(lane);
  Operand const* const first = tile + place.row * Config::kQueryStride + place.chunk * 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Along::copy(*reinterpret_cast<uint128_t const*>(first + step * 16), words(0, 0, step),
                words(1, 0, step), words(2, 0, step), words(3, 0, step));
  }
  return q;
}

// S = Q·Kᵀ (kBlockM, kBlockN)
template <class Config, class Queries>
__device__ auto scores(Queries const& q, typename Config::Cached* k, int lane) {
  using Grid = typename Config::Grid;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDim;
  Tensor s = zeros<Grid, Config::kBlockM, kN>();
  if constexpr (Config::kCodes) {
    multiply_key_codes<Grid, kN, kD>(q, k, lane, s);
  } else {
    multiply_registers<Grid>(q, operand_b<Grid, Along, kN, kD>(k, lane), s);
  }
  return s;
}

// O += P·V, P already in operand registers (MMA, 1, kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(OperandP const& p, typename Config::Cached* v, int lane, Out& out) {
  using Grid = typename Config::Grid;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDimV;
  if constexpr (Config::kCodes) {
    multiply_value_codes<Grid, kN, kD>(p, v, lane, out);
  } else {
    multiply_registers<Grid>(p, operand_b<Grid, Across, kN, kD>(v, lane), out);
  }
}

}  // namespace flash::decode
