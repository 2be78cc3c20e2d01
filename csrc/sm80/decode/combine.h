// Merges the pieces that a row's keys were cut into: one thread block for each row of O.
#pragma once

#include "core/dynamic_smem.h"
#include "core/softmax.h"
#include "params/decode_params.h"
#include "sm80/decode/merge.h"

namespace flash::sm80 {

// Eight warps, so that few rows with very many pieces still have enough reads on their way.
constexpr int kCombineThreads = 256;

template <class Config>
struct CombineStorage {
  static constexpr int kLanes = Config::kHeadDimV / 4;  // four columns each
  static constexpr int kGroups = kCombineThreads / kLanes;
  float reduced[kCombineThreads / 32];
  alignas(16) float4 out[kGroups][kLanes];
};

// All threads get op over all threads' x.
template <class Op>
__device__ float reduce_block(float x, float (&smem)[kCombineThreads / 32], Op op) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  __syncthreads();  // the last result has been read
  if (threadIdx.x % 32 == 0) {
    smem[threadIdx.x / 32] = x;
  }
  __syncthreads();
  x = smem[0];
#pragma unroll
  for (int w = 1; w < kCombineThreads / 32; ++w) {
    x = op(x, smem[w]);
  }
  return x;
}

template <class Config>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(__grid_constant__ DecodeParams const p) {
  using Storage = CombineStorage<Config>;
  auto& smem = *reinterpret_cast<Storage*>(dynamic_smem());
  FwdParams const& f = p.fwd;
  int const rows = f.seqlens.seqlen_q * f.heads_q;
  int const sequence = static_cast<int>(blockIdx.x) / rows;
  int const row_and_head = static_cast<int>(blockIdx.x) - sequence * rows;
  int const query = row_and_head / f.heads_q;
  int const head = row_and_head - query * f.heads_q;
  SequenceSplits const splits = p.sequence_splits[sequence];
  if (splits.count == 1) {
    return;  // the piece was the whole, and is in place
  }
  int const head_kv = p.group.quotient(head);
  int const packed = query * static_cast<int>(p.group.divisor) + p.group.remainder(head, head_kv);
  int const row_block = packed / Config::kBlockM;
  int const tile = row_block * f.heads_kv + head_kv;
  int const tile_row = packed - row_block * Config::kBlockM;
  auto const piece_row = [&](int split) {
    return (int64_t(splits.first + split) * p.split.tiles + tile) * Config::kBlockM + tile_row;
  };

  float const sink = f.scores.s_aux ? f.scores.s_aux[head] : -INFINITY;
  float max = sink;
  for (int i = threadIdx.x; i < splits.count; i += kCombineThreads) {
    max = fmaxf(max, p.partial_lse[piece_row(i)]);
  }
  max = reduce_block(max, smem.reduced, Max{});
  float const offset = max == -INFINITY ? 0.f : max;
  auto const weight = [&](float lse) { return exp2_fast((lse - offset) * kLog2e); };
  float sum = threadIdx.x == 0 ? weight(sink) : 0.f;
  for (int i = threadIdx.x; i < splits.count; i += kCombineThreads) {
    sum += weight(p.partial_lse[piece_row(i)]);
  }
  sum = reduce_block(sum, smem.reduced, Sum{});

  int const lane = threadIdx.x % Storage::kLanes, col = 4 * lane;
  int const first = threadIdx.x / Storage::kLanes;
  float4 total = {0.f, 0.f, 0.f, 0.f};
  if (col < f.head_dim_v) {
#pragma unroll 4
    for (int i = first; i < splits.count; i += Storage::kGroups) {
      int64_t const row = piece_row(i);
      float const w = weight(p.partial_lse[row]);
      float4 const x = *reinterpret_cast<float4 const*>(p.partial_out + row * f.head_dim_v + col);
      total.x += w * x.x;
      total.y += w * x.y;
      total.z += w * x.z;
      total.w += w * x.w;
    }
  }
  smem.out[first][lane] = total;
  __syncthreads();
  float const scale = sum == 0.f ? 0.f : 1.f / sum;
  if (threadIdx.x < Storage::kLanes / 2 && 8 * static_cast<int>(threadIdx.x) < f.head_dim_v) {
    float values[8] = {};
#pragma unroll
    for (int g = 0; g < Storage::kGroups; ++g) {
      auto const* const x = reinterpret_cast<float const*>(&smem.out[g][2 * threadIdx.x]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        values[e] += x[e] * scale;
      }
    }
    DecodeOutput<Config>::store_row(f, sequence, 0, {query, head}, 8 * threadIdx.x, values);
  }
  if (threadIdx.x == 0) {
    *f.lse.at(sequence, query, head) = sum == 0.f ? -INFINITY : offset + logf(sum);
  }
}

}  // namespace flash::sm80
