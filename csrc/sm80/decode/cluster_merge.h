// A tile that the thread blocks of a cluster share becomes one: each has a part of its keys, shows
// the others what it found in shared memory, and merges some of the rows. All parts are there at
// once, so nothing is counted, and nothing goes through L2.
#pragma once

#include "core/cluster.h"
#include "core/softmax.h"
#include "sm80/decode/output.h"

namespace flash::sm80 {

// Where a block's warps leave what they found: in the first warp's place, which whoever writes a
// chunk of it has read before.
template <class Config>
struct ShownOutput {
  DecodeParams const& p;
  DecodeWork<Config> const& work;
  MergeStorage<Config>& smem;

  __device__ float sink(int /*r*/) const { return -INFINITY; }  // the whole's

  __device__ void store_lse(int r, float lse) const { smem.lse[r] = lse; }

  template <int kColumns>
  __device__ void store(int r, int col, float const (&values)[kColumns]) const {
    auto* const target = reinterpret_cast<float4*>(&smem.out[0][r][col]);
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      target[i / 4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
  }
};

// Four columns of a row, of one block after the other: a softmax whose scores are their LSE.
template <class Config>
__device__ OnlineSoftmax<1> attend_blocks(MergeStorage<Config> const& smem, int blocks, int row,
                                          int col, float (&out)[4]) {
  constexpr int kAtOnce = 8;  // on their way
  OnlineSoftmax<1> softmax(kLog2e);
#pragma unroll 1
  for (int first = 0; first < blocks; first += kAtOnce) {
    float weights[kAtOnce];
    float4 parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      bool const exists = first + i < blocks;
      ClusterBlock const block(first + i);
      weights[i] = exists ? block.read(smem.lse[row]) : -INFINITY;
      parts[i] = exists ? block.read(*reinterpret_cast<float4 const*>(&smem.out[0][row][col]))
                        : float4{0.f, 0.f, 0.f, 0.f};
    }
    float rescale[1];
    softmax.step<kAtOnce>([&](int, int i) -> float& { return weights[i]; }, rescale, NoReduce{});
#pragma unroll
    for (float& value : out) {
      value *= rescale[0];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      out[0] += weights[i] * parts[i].x;
      out[1] += weights[i] * parts[i].y;
      out[2] += weights[i] * parts[i].z;
      out[3] += weights[i] * parts[i].w;
    }
  }
  return softmax;
}

// By all threads of the cluster, whose blocks have shown their parts. The blocks take turns at the
// rows.
template <class Config>
__device__ void merge_cluster(DecodeOutput<Config> const& output, PieceShare const& share,
                              MergeStorage<Config> const& smem) {
  using Storage = PieceMergeStorage<Config>;
  int const rows = output.work.tile.rows;
  int const col = Storage::kColumns * (threadIdx.x % Storage::kLanes);
  bool const has_columns = col < output.p.fwd.head_dim_v;
  sync_cluster();
#pragma unroll 1
  for (int row = share.first_row(threadIdx.x / Storage::kLanes); has_columns && row < rows;
       row += share.row_step(Storage::kGroups)) {
    float out[Storage::kColumns] = {};
    OnlineSoftmax<1> softmax = attend_blocks(smem, share.blocks(), row, col, out);
    auto const closed = softmax.finish(0, output.sink(row), NoReduce{});
#pragma unroll
    for (float& value : out) {
      value *= closed.out_scale;
    }
    output.store(row, col, out);
    if (col == 0) {
      output.store_lse(row, closed.lse);
    }
  }
  sync_cluster();
}

}  // namespace flash::sm80
