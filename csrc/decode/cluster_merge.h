// Merges a tile that the CTAs of a cluster share. Each has a share of the keys, and sends its
// result of every row to the CTA that merges this row. All of them run at once, so nothing is
// counted, and nothing goes through L2.
#pragma once

#include "core/cluster.h"
#include "core/cluster_size.h"
#include "decode/output.h"

namespace flash::decode {

// The results that a CTA receives: for each row that it merges, one of each CTA. In ClusterStorage
// the CTA does not use this memory otherwise: so the others may write as soon as the CTA has begun,
// whatever it does at the time.
template <class Config>
struct ClusterInbox {
  alignas(16) float out[Config::kBlockM][Config::kHeadDimV];
  float lse[Config::kBlockM];
};

template <class Config>
struct ClusterStorage {
  DecodeStorage<Config> block;  // first, because other kernels have it alone
  ClusterInbox<Config> inbox;
};

// Where this CTA's result of a row goes: the inbox of the CTA that merges the row
// (PieceShare::first_row).
struct InboxPlace {
  ClusterBlock block;
  int index;

  __device__ InboxPlace(PieceShare const& share, int row)
      : block(row & (share.blocks() - 1)), index(first(share, row) + share.rank()) {}

  // The first of the row's results, which lie side by side
  __device__ static int first(PieceShare const& share, int row) {
    return row >> share.log2 << share.log2;
  }
};

// Where a CTA's warps send their results. Between wait_until_open and the next barrier of the
// cluster all CTAs can be written to.
template <class Config>
struct SentOutput {
  static constexpr bool kOpensLate = true;
  static_assert(1 << kMostClusterLog2 <= Config::kBlockM, "as many parts as there are places");
  DecodeParams const& p;
  DecodeWork<Config> const& work;
  PieceShare const& share;
  ClusterInbox<Config>& inbox;

  __device__ void wait_until_open() const { wait_for_cluster(); }

  __device__ float sink(int /*r*/) const { return -INFINITY; }  // the merged row has it

  __device__ void store_lse(int r, float lse) const {
    InboxPlace const to(share, r);
    to.block.write(inbox.lse[to.index], lse);
  }

  template <int kColumns>
  __device__ void store(int r, int col, float const (&values)[kColumns]) const {
    InboxPlace const to(share, r);
    auto* const target = reinterpret_cast<float4*>(&inbox.out[to.index][col]);
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      to.block.write(target[i / 4], {values[i], values[i + 1], values[i + 2], values[i + 3]});
    }
  }
};

// Four columns of a row over its results: a softmax whose scores are the LSE of the results.
template <class Config>
__device__ OnlineSoftmax<1> attend_parts(ClusterInbox<Config> const& inbox, int begin, int parts,
                                         int col, float (&out)[4]) {
  constexpr int kAtOnce = 8;
  OnlineSoftmax<1> softmax(kLog2e);
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    float weights[kAtOnce];
    float4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      bool const exists = first + i < parts;
      int const at = begin + first + i;
      weights[i] = exists ? inbox.lse[at] : -INFINITY;
      values[i] = exists ? *reinterpret_cast<float4 const*>(&inbox.out[at][col])
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
      out[0] += weights[i] * values[i].x;
      out[1] += weights[i] * values[i].y;
      out[2] += weights[i] * values[i].z;
      out[3] += weights[i] * values[i].w;
    }
  }
  return softmax;
}

// Called by all threads of a CTA, after the barrier of the cluster that follows the sending.
template <class Config>
__device__ void merge_inbox(DecodeOutput<Config> const& output, PieceShare const& share,
                            ClusterInbox<Config> const& inbox) {
  using Threads = MergingThreads<Config>;
  int const rows = output.work.tile.rows;
  int const col = Threads::kColumns * (threadIdx.x % Threads::kLanes);
  bool const has_columns = col < output.p.fwd.head_dim_v;
#pragma unroll 1
  for (int row = share.first_row(threadIdx.x / Threads::kLanes); has_columns && row < rows;
       row += share.row_step(Threads::kRows)) {
    float out[Threads::kColumns] = {};
    OnlineSoftmax<1> softmax =
        attend_parts(inbox, InboxPlace::first(share, row), share.blocks(), col, out);
    output.finish(row, col, softmax, out);
  }
}

}  // namespace flash::decode
