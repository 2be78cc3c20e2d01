// Merges the results of a CTA's warps. The merged rows go to O and LSE, or to the workspace if
// other CTAs have more keys of the same rows.
#pragma once

#include "decode/output.h"
#include "decode/warp_attention.h"

namespace flash::decode {

// The factor that makes sums and outputs relative to `max` relative to `larger`.
__device__ inline float weight_of(float max, float larger, float scale_log2) {
  return exp2_fast(fminf((max - larger) * scale_log2, 0.f));
}

// The softmax of the lane's rows over all warps, and in `factor` what this warp's O is multiplied
// by.
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
    auto const weight = [&](float max) { return weight_of(max, merged.max[r], merged.scale_log2); };
    merged.sum[r] = 0.f;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      merged.sum[r] += smem.sum[w][row] * weight(smem.max[w][row]);
    }
    factor[r] = weight(mine.max[r]);
  }
  return merged;
}

// Output: where the rows go. An output that opens late (Output::kOpensLate) is waited for only when
// there is something to send.
template <class Config, class Output>
__device__ void merge_and_store(Output const& output, MergeStorage<Config>& smem, int warp,
                                int lane, WarpAccumulators<Config>& acc) {
  FragmentCoord<1> const coord(lane);
  int const rows = output.work.tile.rows;
  __syncthreads();  // every warp is done with its ring, which lies in the same memory
  float factor[2], lse[2];
  auto const store_lse = [&](int r, float of_row) {
    if (warp == 0 && coord.col0 == 0 && coord.row(r) < rows) {
      output.store_lse(coord.row(r), of_row);
    }
  };
  OnlineSoftmax<2> softmax = merged_softmax<Config>(smem, acc.softmax, warp, coord, factor);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto const row = softmax.finish(r, output.sink(coord.row(r)), NoReduce{});
    factor[r] *= row.out_scale * (Config::kCodes ? acc.out_factor : 1.f);
    lse[r] = row.lse;
    if constexpr (!Output::kOpensLate) {
      store_lse(r, row.lse);
    }
  }
  acc.rescale(factor);
  Tensor o = acc.rows();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const row = smem.out[warp][coord.row(r)];
#pragma unroll
    for (int c = 0; c < size<1>(o); c += 4) {
      if constexpr (Config::kCodes) {  // see multiply_value_codes
        *reinterpret_cast<float4*>(&row[c * 4 + coord.col0 * 2]) = {o(r, c), o(r, c + 2),
                                                                    o(r, c + 1), o(r, c + 3)};
      } else {
        *reinterpret_cast<float2*>(&row[coord.col(c)]) = {o(r, c), o(r, c + 1)};
        *reinterpret_cast<float2*>(&row[coord.col(c + 2)]) = {o(r, c + 2), o(r, c + 3)};
      }
    }
  }
  __syncthreads();
  if constexpr (Output::kOpensLate) {
    output.wait_until_open();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_lse(r, lse[r]);
    }
  }
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

}  // namespace flash::decode
