// Merges the pieces of tiles whose keys were cut, in a launch of its own: a tile's rows, in parts
// of 128 columns, are shared by as many CTAs as it has pieces. The last CTA alone, as in decode,
// would take 2 µs a piece: it has 64 rows of 512 columns.
#pragma once

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "decode/find_work.h"
#include "decode/output.h"

namespace flash::sm90::latent {

constexpr int kMergeThreads = 1024;  // so many, because each loads few numbers at a time
constexpr int kMergeWarps = kMergeThreads / WarpLanes::kCount;

template <class Config>
struct MergeStorage {
  struct Sums {
    float4 out[WarpLanes::kCount];
    float weights;
  };
  alignas(16) char work[sizeof(decode::DecodeWork<Config>)];
  Sums sums[kMergeWarps];
};

// Four columns of a row, for each lane, of every `share`-th piece from `first` on. All lanes of a
// warp call its functions together.
template <class Config>
struct RowMerge {
  static constexpr int kColumns = 4, kAhead = 4;  // pieces that are loaded together
  using Output = decode::DecodeOutput<Config>;

  Output const& output;
  int row;
  int col;
  int first;
  int share;
  OnlineSoftmax<1> softmax{kLog2e};
  float out[kColumns] = {};

  __device__ void run() {
    int const pieces = output.work.piece.count, lane = WarpLanes{}.index();
    int const own = (pieces - first + share - 1) / share;
    float4 x[kAhead];
    load(0, own, x);  // on their way with the first LSE
    for (int m = lane; m < pieces; m += WarpLanes::kCount) {
      softmax.max[0] = fmaxf(softmax.max[0], lse(m));
    }
#pragma unroll
    for (int distance = WarpLanes::kCount / 2; distance > 0; distance /= 2) {
      softmax.max[0] =
          fmaxf(softmax.max[0], __shfl_xor_sync(WarpLanes::kAll, softmax.max[0], distance));
    }
    float weight = 0.f;
    for (int begin = 0; begin < own; begin += kAhead) {
      int const of_lanes = begin % WarpLanes::kCount;
      if (of_lanes == 0) {
        int const i = begin + lane;
        // A NaN, which no maximum sees, enters the result here.
        float const log = i < own ? lse(first + i * share) : -INFINITY;
        weight = exp2_fast((log - softmax.max[0]) * softmax.scale_log2);
      }
      add(of_lanes, min(own - begin, kAhead), weight, x);
      load(begin + kAhead, own, x);
    }
  }

  // Adds what another warp has of the same row and columns.
  __device__ void add(typename MergeStorage<Config>::Sums const& other) {
    softmax.sum[0] += other.weights;
    float4 const x = other.out[WarpLanes{}.index()];
    out[0] += x.x;
    out[1] += x.y;
    out[2] += x.z;
    out[3] += x.w;
  }

 private:
  __device__ int64_t partial_row(int piece) const {
    return Output::partial_row(output.work.piece, piece, row);
  }
  __device__ float lse(int piece) const {
    return __ldcg(output.p.partial_lse + partial_row(piece));
  }

  // Starts to load the warp's pieces from number `begin` on, of `own`.
  __device__ void load(int begin, int own, float4 (&x)[kAhead]) const {
    int const columns = output.p.fwd.head_dim_v;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      bool const exists = begin + i < own && col < columns;
      int64_t const index = partial_row(first + (begin + i) * share) * columns + col;
      x[i] = exists ? __ldcg(reinterpret_cast<float4 const*>(output.p.partial_out + index))
                    : float4{0.f, 0.f, 0.f, 0.f};
    }
  }

  // weight: of `count` pieces, in the lanes from `lane` on
  __device__ void add(int lane, int count, float weight, float4 const (&x)[kAhead]) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float const own = __shfl_sync(WarpLanes::kAll, weight, lane + i);
      if (i < count) {
        softmax.sum[0] += own;
        out[0] += own * x[i].x;
        out[1] += own * x[i].y;
        out[2] += own * x[i].z;
        out[3] += own * x[i].w;
      }
    }
  }
};

// Merges every `pieces`-th part of a row of the piece's tile, from the piece's number on.
template <class Config>
__device__ void merge_rows(decode::DecodeOutput<Config> const& output, MergeStorage<Config>& smem) {
  using Merge = RowMerge<Config>;
  constexpr int kWarpColumns = Merge::kColumns * WarpLanes::kCount;
  constexpr int kParts = Config::kHeadDimV / kWarpColumns;  // of a row
  decode::DecodeWork<Config> const& work = output.work;
  int const pieces = work.piece.count, warp = threadIdx.x / WarpLanes::kCount;
  int const lane = WarpLanes{}.index();
  int const parts = (work.tile.rows * kParts - work.piece.number + pieces - 1) / pieces;
  int share = 1;  // warps of a part, so that all have some
  while (parts > 0 && 2 * share * parts <= kMergeWarps) {
    share *= 2;
  }
  for (int begin = 0; begin < parts; begin += kMergeWarps / share) {
    int const part = begin + warp / share;
    int const of_tile = work.piece.number + part * pieces;
    int const col = of_tile % kParts * kWarpColumns + lane * Merge::kColumns;
    Merge merge{output, of_tile / kParts, col, warp % share, share};
    if (part < parts) {
      merge.run();
    }
    if (share > 1) {  // then there is one round
      smem.sums[warp].out[lane] = {merge.out[0], merge.out[1], merge.out[2], merge.out[3]};
      smem.sums[warp].weights = merge.softmax.sum[0];
      __syncthreads();
    }
    if (part < parts && warp % share == 0) {
      for (int other = 1; other < share; ++other) {
        merge.add(smem.sums[warp + other]);
      }
      if (col < output.p.fwd.head_dim_v) {
        output.finish(merge.row, col, merge.softmax, merge.out);
      }
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(__grid_constant__ DecodeParams const p) {
  auto& smem = *reinterpret_cast<MergeStorage<Config>*>(dynamic_smem());
  auto& work = *reinterpret_cast<decode::DecodeWork<Config>*>(smem.work);
  if (threadIdx.x < WarpLanes::kCount) {
    decode::find_work(p, decode::PieceShare{0}, work);
  }
  __syncthreads();
  wait_for_launch_before();
  if (work.piece.valid && work.piece.count > 1) {
    using Output = decode::DecodeOutput<Config>;
    merge_rows(Output{p, work, Output::kWhole}, smem);
  }
}

}  // namespace flash::sm90::latent
