// The warps' results become one, which goes to O and LSE, or to the workspace if other thread
// blocks have more keys of the same rows.
#pragma once

#include "core/split_schedule.h"
#include "params/decode_params.h"
#include "sm80/decode/warp_attention.h"

namespace flash::sm80 {

// Where a tile's rows go: O and LSE, or this piece's rows of the workspace.
template <class Config>
struct DecodeOutput {
  using Element = typename Config::Element;
  DecodeParams const& p;
  DecodeWork<Config> const& work;

  __device__ bool partial() const { return work.piece.splits > 1; }

  __device__ int64_t partial_row(int r) const {
    Piece const& piece = work.piece;
    int64_t const column = piece.first_column + piece.split;
    return (column * p.split.tiles + piece.tile) * Config::kBlockM + r;
  }

  // The row's logit. It belongs to the row once: if there are more pieces, to their merging.
  __device__ float sink(int r) const {
    float const* const sinks = p.fwd.scores.s_aux;
    bool const here = sinks && !partial() && r < work.tile.rows;
    return here ? sinks[work.tile.row(p.group, r).head] : -INFINITY;
  }

  __device__ void store_lse(int r, float lse) const {
    DecodeTile<Config> const& tile = work.tile;
    QueryRow const row = tile.row(p.group, r);
    *(partial() ? p.partial_lse + partial_row(r)
                : p.fwd.lse.at(tile.sequence, tile.info.row_q + row.query, row.head)) = lse;
  }

  // Columns [col, col + 8) of row r
  __device__ void store(int r, int col, float const (&values)[8]) const {
    if (partial()) {
      auto* const target =
          reinterpret_cast<float4*>(p.partial_out + partial_row(r) * p.fwd.head_dim_v + col);
      target[0] = {values[0], values[1], values[2], values[3]};
      target[1] = {values[4], values[5], values[6], values[7]};
      return;
    }
    DecodeTile<Config> const& tile = work.tile;
    store_row(p.fwd, tile.sequence, tile.info.row_q, tile.row(p.group, r), col, values);
  }

  // Columns [col, col + 8) of O
  __device__ static void store_row(FwdParams const& p, int sequence, int64_t row_q, QueryRow row,
                                   int col, float const (&values)[8]) {
    cutlass::NumericArrayConverter<Element, float, 8> convert;
    auto const rounded = convert(*reinterpret_cast<cutlass::Array<float, 8> const*>(values));
    Element* const target = static_cast<Element*>(p.out.ptr) +
                            p.out.offset(sequence, row_q + row.query, row.head) + col;
    *reinterpret_cast<uint128_t*>(target) = *reinterpret_cast<uint128_t const*>(&rounded);
  }
};

// All warps' softmax of the lane's rows as one, and what this warp's O is multiplied by.
template <class Config>
__device__ OnlineSoftmax<2> merged_softmax(MergeStorage<Config>& smem, OnlineSoftmax<2> const& mine,
                                           int warp, FragmentCoord<1> coord, float (&factor)[2]) {
  OnlineSoftmax<2> merged = mine;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float const sum = QuadReduce{}(mine.sum[r], Sum{});
    if (coord.col0 == 0) {
      smem.max[warp][coord.row(r)] = mine.max[r];
      smem.sum[warp][coord.row(r)] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const row = coord.row(r);
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      merged.max[r] = fmaxf(merged.max[r], smem.max[w][row]);
    }
    auto const weight = [&](float max) {
      return exp2_fast(fminf((max - merged.max[r]) * merged.scale_log2, 0.f));
    };
    // No warp saw a key, or nothing but NaN: weights of one keep it.
    bool const any = merged.max[r] != -INFINITY;
    merged.sum[r] = 0.f;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      merged.sum[r] += smem.sum[w][row] * (any ? weight(smem.max[w][row]) : 1.f);
    }
    factor[r] = any ? weight(mine.max[r]) : 1.f;
  }
  return merged;
}

template <class Config>
__device__ void merge_and_store(DecodeOutput<Config> const& output, MergeStorage<Config>& smem,
                                int warp, int lane, WarpAccumulators<Config>& acc) {
  FragmentCoord<1> const coord(lane);
  int const rows = output.work.tile.rows;
  __syncthreads();  // every warp is done with its ring, which lies in the same memory
  float factor[2];
  OnlineSoftmax<2> softmax = merged_softmax<Config>(smem, acc.softmax, warp, coord, factor);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto const row = softmax.finish(r, output.sink(coord.row(r)), NoReduce{});
    factor[r] *= row.out_scale;
    if (warp == 0 && coord.col0 == 0 && coord.row(r) < rows) {
      output.store_lse(coord.row(r), row.lse);
    }
  }
  acc.rescale(factor);
  Tensor o = acc.rows();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < size<1>(o); c += 2) {
      *reinterpret_cast<float2*>(&smem.out[warp][coord.row(r)][coord.col(c)]) = {o(r, c),
                                                                                 o(r, c + 1)};
    }
  }
  __syncthreads();
  constexpr int kChunks = Config::kHeadDimV / 8;
  for (int i = threadIdx.x; i < rows * kChunks; i += Config::kThreads) {
    int const r = i / kChunks, col = i % kChunks * 8;
    if (col >= output.p.fwd.head_dim_v) {
      continue;
    }
    float values[8] = {};
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        values[e] += smem.out[w][r][col + e];
      }
    }
    output.store(r, col, values);
  }
}

}  // namespace flash::sm80
