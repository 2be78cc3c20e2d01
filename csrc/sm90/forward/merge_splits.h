// Merges the KV splits of each row, which several CTAs have computed: a softmax over the splits,
// whose scores are their LSE and whose values are their rows.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "core/early_launch.h"
#include "core/softmax.h"
#include "core/warp_lanes.h"
#include "params/fwd_params.h"

namespace flash::sm90::forward {

constexpr int kMergeRows = 4;  // of a CTA, a warp each

struct MergeRow {
  int batch;
  int row;
  int head;
  bool exists;
};

// Heads first: their rows are neighbours in memory.
__device__ inline MergeRow merge_row(FwdParams const& p, int64_t index) {
  int64_t const token = index / p.heads_q;
  int const head = static_cast<int>(index - token * p.heads_q);
  Seqlens const& s = p.seqlens;
  if (s.cu_q) {
    return {0, static_cast<int>(token), head, token < s.total_q};
  }
  int const batch = static_cast<int>(token / s.seqlen_q);
  return {batch, static_cast<int>(token - int64_t(batch) * s.seqlen_q), head, batch < s.batch};
}

// The weight of this lane's split, and the row's LSE. All lanes call it.
struct SplitWeight {
  float weight;
  float lse;

  __device__ SplitWeight(KeySplits const& splits, float const* first, bool read) {
    int const lane = WarpLanes{}.index();
    bool const mine = read && lane < static_cast<int>(splits.count.divisor);
    float const own = mine ? first[lane * splits.lse_apart] : -INFINITY;
    OnlineSoftmax<1> softmax(kLog2e);
    softmax.max[0] = own;
#pragma unroll
    for (int distance = WarpLanes::kCount / 2; distance > 0; distance /= 2) {
      softmax.max[0] =
          fmaxf(softmax.max[0], __shfl_xor_sync(WarpLanes::kAll, softmax.max[0], distance));
    }
    // If no key was seen, no split has a weight, and a sink of +inf takes all of it. NaN, which no
    // maximum sees, passes through.
    bool const top = own == softmax.max[0];
    weight = own == -INFINITY ? 0.f
             : top            ? 1.f
                              : exp2_fast((own - softmax.max[0]) * softmax.scale_log2);
    softmax.sum[0] = weight;
#pragma unroll
    for (int distance = WarpLanes::kCount / 2; distance > 0; distance /= 2) {
      softmax.sum[0] += __shfl_xor_sync(WarpLanes::kAll, softmax.sum[0], distance);
    }
    auto const row = softmax.finish(0, -INFINITY, NoReduce{});
    weight *= row.out_scale;
    lse = row.lse;
  }

  __device__ float of(int split) const { return __shfl_sync(WarpLanes::kAll, weight, split); }
};

// A warp merges a row. there: whether the splits are; if not, nothing is read or written.
template <class Config>
struct RowMerge {
  using Element = typename Config::Element;
  static constexpr int kColumns = 4;  // of a lane, at a time
  static constexpr int kStep = WarpLanes::kCount * kColumns;
  using Columns = cutlass::Array<float, kColumns>;

  FwdParams const& p;
  MergeRow const& at;
  bool there;
  int splits;
  float const* first;  // columns of the first split
  Element* out;

  __device__ RowMerge(FwdParams const& p, MergeRow const& at, bool there)
      : p(p),
        at(at),
        there(there),
        splits(static_cast<int>(p.splits.count.divisor)),
        first(p.splits.out.ptr + p.splits.out.offset(at.batch, at.row, at.head)),
        out(static_cast<Element*>(p.out.ptr) + p.out.offset(at.batch, at.row, at.head)) {}

  __device__ SplitWeight weights() const {
    return {p.splits, p.splits.lse.at(at.batch, at.row, at.head), there};
  }

  __device__ bool has(int col) const { return there && col < p.head_dim_v; }

  // Zeros for columns that do not exist.
  __device__ float4 load(int split, int col, bool exists) const {
    return exists ? *reinterpret_cast<float4 const*>(first + split * p.splits.out_apart + col)
                  : float4{};
  }

  __device__ static void add(Columns& sum, float weight, float4 x) {
    sum[0] += weight * x.x;
    sum[1] += weight * x.y;
    sum[2] += weight * x.z;
    sum[3] += weight * x.w;
  }

  __device__ void store_lse(SplitWeight const& mine) const {
    if (there && WarpLanes{}.index() == 0) {
      *p.lse.at(at.batch, at.row, at.head) = mine.lse;
    }
  }

  __device__ void store(int col, bool exists, Columns const& sum) const {
    if (exists) {
      using Rounded = cutlass::AlignedArray<Element, kColumns>;
      static_cast<cutlass::Array<Element, kColumns>&>(*reinterpret_cast<Rounded*>(out + col)) =
          cutlass::NumericArrayConverter<Element, float, kColumns>{}(sum);
    }
  }

  // For any number of splits.
  __device__ void run() const {
    constexpr int kParts = 4;  // on their way at a time
    SplitWeight const mine = weights();
    store_lse(mine);
#pragma unroll
    for (int begin = 0; begin < Config::kHeadDimV; begin += kStep) {
      int const col = begin + WarpLanes{}.index() * kColumns;
      bool const exists = has(col);
      Columns sum;
      sum.clear();
#pragma unroll kParts
      for (int split = 0; split < splits; ++split) {
        float const weight = mine.of(split);
        add(sum, weight, load(split, col, exists));
      }
      store(col, exists, sum);
    }
  }

  // For at most kMostSplitsAtOnce splits: all are loaded before their LSE are there. The bits are
  // those of run(), but for zero's sign: a split that does not exist adds zero times zero.
  __device__ void run_at_once() const {
#pragma unroll 1  // cold code costs more than the weights, computed again
    for (int begin = 0; begin < Config::kHeadDimV; begin += kStep) {
      int const col = begin + WarpLanes{}.index() * kColumns;
      bool const exists = has(col);
      float4 x[kMostSplitsAtOnce];
#pragma unroll
      for (int split = 0; split < kMostSplitsAtOnce; ++split) {
        x[split] = load(split, col, exists && split < splits);
      }
      SplitWeight const mine = weights();
      if (begin == 0) {
        store_lse(mine);
      }
      Columns sum;
      sum.clear();
#pragma unroll
      for (int split = 0; split < kMostSplitsAtOnce; ++split) {
        add(sum, mine.of(split), x[split]);
      }
      store(col, exists, sum);
    }
  }
};

// kAtOnce: see merges_at_once (launch/key_splits.h).
template <class Config, bool kAtOnce>
__global__ void __launch_bounds__(kMergeRows * 32)
    merge_splits_kernel(__grid_constant__ FwdParams const p) {
  MergeRow const at = merge_row(p, int64_t(blockIdx.x) * kMergeRows + threadIdx.x / 32);
  // Cold code comes from memory, instruction by instruction: so it runs once while the splits are
  // still being computed.
#pragma unroll 1  // one copy of it
  for (int round = 0; round < 2; ++round) {
    if (round == 1) {
      wait_for_launch_before();
    }
    if (at.exists) {
      RowMerge<Config> const row(p, at, round == 1);
      if constexpr (kAtOnce) {
        row.run_at_once();
      } else {
        row.run();
      }
    }
  }
}

}  // namespace flash::sm90::forward
