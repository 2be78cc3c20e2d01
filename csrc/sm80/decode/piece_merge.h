// The pieces that a tile's keys were cut into become one, by the thread block that is the last to
// be done with its own: no second launch, and nobody waits.
#pragma once

#include "core/merge_rounds.h"
#include "core/softmax.h"
#include "sm80/decode/merge.h"
#include "sm80/decode/output.h"

namespace flash::sm80 {

// Counters of pieces that are done: zero when the library is loaded and, since each launch leaves
// them so, before every launch. A range for each launch that may run at the same time.
constexpr int kCounterRanges = 128;
constexpr int kCounters = 1 << 12;
__device__ static uint32_t piece_counters[kCounterRanges][kCounters];

// Rows that one thread block merges in a round. 160 KiB at d 128, which it reads in 1.5 µs, the
// time that a round costs as well; and 20 pieces of 16 rows, which is two rounds for a piece in
// each place of an H200.
constexpr int kMergedRows = 320;

// Whether all other members of the group have been here: by all threads, each of which is done
// with what it writes. If so, the counter is as it was before the launch, and what they have
// written can be read.
__device__ inline bool last_to_arrive(uint32_t* counter, int members) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // before it is counted, what the thread block wrote is there for all
    last = atomicInc(counter, members - 1) == unsigned(members - 1);
  }
  last = __syncthreads_or(last);
  if (last) {
    __threadfence();
  }
  return last;
}

// Online softmax once more, with the pieces for keys: their LSE are the scores, and their rows the
// values. A thread has four columns of up to kRows rows at a time.
template <class Config, int kRows>
struct PieceMerge {
  using Storage = PieceMergeStorage<Config>;
  // Reads of 16 bytes that a thread has on their way: 32 KiB of a block, which keep an SM's share
  // of L2 busy.
  static constexpr int kPieces = 16 / kRows;

  DecodeOutput<Config> const& output;
  MergeGroup const& group;
  // Of threads, `parts` have the same row, and each of them every parts-th piece.
  int parts;
  int part;
  int col;
  OnlineSoftmax<kRows> softmax{kLog2e};
  float out[kRows][Storage::kColumns] = {};

  // Row `row` + r * step, of rows that exist in [0, end)
  __device__ void add_pieces(int row, int step, int end) {
    DecodeParams const& p = output.p;
    for (int first = part; first < group.count; first += kPieces * parts) {
      float lse[kRows][kPieces];
      float4 x[kRows][kPieces];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
          int const member = first + n * parts;
          lse[r][n] = -INFINITY;
          x[r][n] = {0.f, 0.f, 0.f, 0.f};
          if (member < group.count && row + r * step < end) {
            int64_t const at =
                output.partial_row(p, output.work.piece, group.first + member * group.stride,
                                   row + r * step);
            // From L2: this SM's L1 may hold what was there before.
            lse[r][n] = __ldcg(p.partial_lse + at);
            x[r][n] = __ldcg(
                reinterpret_cast<float4 const*>(p.partial_out + at * p.fwd.head_dim_v + col));
          }
        }
      }
      add(lse, x);
    }
  }

  __device__ void add(float (&lse)[kRows][kPieces], float4 const (&x)[kRows][kPieces]) {
    float factor[kRows];
    softmax.template step<kPieces>([&](int r, int n) -> float& { return lse[r][n]; }, factor,
                                   NoReduce{});
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (float& value : out[r]) {
        value *= factor[r];
      }
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        out[r][0] += lse[r][n] * x[r][n].x;
        out[r][1] += lse[r][n] * x[r][n].y;
        out[r][2] += lse[r][n] * x[r][n].z;
        out[r][3] += lse[r][n] * x[r][n].w;
      }
    }
  }

  // All parts' softmax and output as one, in the first of them. By all threads.
  __device__ void add_parts(Storage& smem, int lane, int thread_group) {
    static_assert(kRows == 1);
    if (lane == 0) {
      smem.max[thread_group] = softmax.max[0];
      smem.sum[thread_group] = softmax.sum[0];
    }
    smem.out[thread_group][lane] = {out[0][0], out[0][1], out[0][2], out[0][3]};
    __syncthreads();
    if (part != 0) {
      return;
    }
    float max = softmax.max[0];
    for (int other = 1; other < parts; ++other) {
      max = fmaxf(max, smem.max[thread_group + other]);
    }
    float sum = 0.f;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    for (int other = 0; other < parts; ++other) {
      float const weight = weight_of(smem.max[thread_group + other], max, softmax.scale_log2);
      float4 const x = smem.out[thread_group + other][lane];
      sum += weight * smem.sum[thread_group + other];
      total.x += weight * x.x;
      total.y += weight * x.y;
      total.z += weight * x.z;
      total.w += weight * x.w;
    }
    softmax.max[0] = max;
    softmax.sum[0] = sum;
    out[0][0] = total.x;
    out[0][1] = total.y;
    out[0][2] = total.z;
    out[0][3] = total.w;
  }

  __device__ void store(int row, int step, int end) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * step >= end) {
        return;
      }
      auto const closed = softmax.finish(r, output.sink(row + r * step), NoReduce{});
#pragma unroll
      for (float& value : out[r]) {
        value *= closed.out_scale;
      }
      output.store(row + r * step, col, out[r]);
      if (col == 0) {
        output.store_lse(row + r * step, closed.lse);
      }
    }
  }
};

// By all threads; kRows: rows of the tile that a thread has, or a fourth of them.
template <class Config, int kRows>
__device__ void merge_group(DecodeOutput<Config> const& output, MergeGroup const& group,
                            PieceMergeStorage<Config>& smem) {
  constexpr int kLanes = PieceMergeStorage<Config>::kLanes;
  constexpr int kGroups = PieceMergeStorage<Config>::kGroups;
  int const lane = threadIdx.x % kLanes, thread_group = threadIdx.x / kLanes;
  int const rows = output.work.tile.rows;
  // A power of two, so that no threads are left over.
  int const parts = kRows == 1 ? kGroups / rows : 1;
  int const step = kGroups / parts, col = PieceMergeStorage<Config>::kColumns * lane;
  int const end = col < output.p.fwd.head_dim_v ? rows : 0;
  for (int row = thread_group / parts, first = 0; first < rows;
       row += kRows * step, first += kRows * step) {
    PieceMerge<Config, kRows> merge{output, group, parts, thread_group % parts, col};
    merge.add_pieces(row, step, end);
    if constexpr (kRows == 1) {
      if (parts > 1) {
        merge.add_parts(smem, lane, thread_group);
      }
    }
    __syncthreads();  // the group's result takes the place of a member, which all have read by now
    if (merge.part == 0) {
      merge.store(row, step, end);
    }
  }
}

// After a piece has been stored in the workspace. range: of counters, or -1: the workspace's.
template <class Config>
__device__ void merge_pieces(DecodeParams const& p, DecodeWork<Config> const& work, int range,
                             PieceMergeStorage<Config>& smem) {
  using Output = DecodeOutput<Config>;
  constexpr int kGroups = PieceMergeStorage<Config>::kGroups;
  Piece const& piece = work.piece;
  uint32_t* const counters = range >= 0 ? piece_counters[range] : p.counters;
  int const rows = work.tile.rows;
  for (MergeRounds rounds(piece.splits, piece.split, kMergedRows / rows); rounds.valid();
       rounds.next()) {
    MergeGroup const group = rounds.group();
    if (group.count == 1) {
      continue;  // already where it belongs
    }
    int64_t const counter =
        int64_t(piece.first_column + group.counter) * p.split.tiles.divisor + piece.tile;
    if (!last_to_arrive(counters + counter, group.count)) {
      return;
    }
    Output const output{p, work, rounds.last() ? Output::kWhole : group.first};
    if (rows <= kGroups) {
      merge_group<Config, 1>(output, group, smem);
    } else if (rows <= 2 * kGroups) {
      merge_group<Config, 2>(output, group, smem);
    } else {
      merge_group<Config, 4>(output, group, smem);
    }
  }
}

}  // namespace flash::sm80
