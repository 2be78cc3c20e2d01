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

// Whether all other members of the group have been here. By all threads, each of which is done with
// what it writes; if so, the counter is as it was before the launch, and what the others have
// written can be read. One thread's fences are all threads', since barriers are before and after.
__device__ inline bool last_to_arrive(uint32_t* counter, int members) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, members - 1) == unsigned(members - 1);
    __threadfence();
  }
  return __syncthreads_or(last);
}

// A group's rows in the workspace, as one thread reads them: four columns of each. Row r of member
// n is at n * member + r * row.
struct MemberRows {
  float const* lse;
  float const* out;
  int64_t member;  // in rows
  int row;
  int columns;
};

// Online softmax once more, with the pieces for keys: their LSE are the scores, and their rows the
// values. A thread has four columns of up to kRows rows at a time.
template <class Config, int kRows>
struct PieceMerge {
  using Storage = PieceMergeStorage<Config>;
  // Reads of 16 bytes that a thread has on their way: 32 KiB of a block, which keep an SM's share
  // of L2 busy.
  static constexpr int kPieces = 16 / kRows;

  // Of threads, `parts` have the same row, and each of them every parts-th piece.
  int parts;
  int part;
  OnlineSoftmax<kRows> softmax{kLog2e};
  float out[kRows][Storage::kColumns] = {};

  // Of `members` pieces the first `rows` rows.
  __device__ void add_pieces(MemberRows const& from, int members, int rows) {
    for (int first = part; first < members; first += kPieces * parts) {
      float lse[kRows][kPieces];
      float4 x[kRows][kPieces];
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        int const member = first + n * parts;
        float const* const lses = from.lse + member * from.member;
        float const* const outs = from.out + member * from.member * from.columns;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          lse[r][n] = -INFINITY;
          x[r][n] = {0.f, 0.f, 0.f, 0.f};
          if (member < members && r < rows) {
            // From L2: this SM's L1 may hold what was there before.
            lse[r][n] = __ldcg(lses + r * from.row);
            x[r][n] = __ldcg(reinterpret_cast<float4 const*>(outs + r * from.row * from.columns));
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

  // Row `row` and every step-th after it, of which there are `rows`.
  __device__ void store(DecodeOutput<Config> const& output, int row, int step, int rows, int col) {
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += step) {
      if (r >= rows) {
        return;
      }
      auto const closed = softmax.finish(r, output.sink(row), NoReduce{});
#pragma unroll
      for (float& value : out[r]) {
        value *= closed.out_scale;
      }
      output.store(row, col, out[r]);
      if (col == 0) {
        output.store_lse(row, closed.lse);
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
  DecodeParams const& p = output.p;
  int const lane = threadIdx.x % kLanes, thread_group = threadIdx.x / kLanes;
  int const rows = output.work.tile.rows;
  // A power of two, so that no threads are left over.
  int const parts = kRows == 1 ? kGroups / rows : 1;
  int const step = kGroups / parts, col = PieceMergeStorage<Config>::kColumns * lane;
  for (int first = 0; first < rows; first += kRows * step) {
    int const row = first + thread_group / parts;
    int const mine = col < p.fwd.head_dim_v ? (rows - row + step - 1) / step : 0;
    int64_t const from = output.partial_row(p, output.work.piece, group.first, row);
    PieceMerge<Config, kRows> merge{parts, thread_group % parts};
    merge.add_pieces(
        {p.partial_lse + from, p.partial_out + from * p.fwd.head_dim_v + col,
         int64_t(group.stride) * p.split.tiles.divisor * Config::kBlockM, step, p.fwd.head_dim_v},
        group.count, mine);
    if constexpr (kRows == 1) {
      if (parts > 1) {
        merge.add_parts(smem, lane, thread_group);
      }
    }
    __syncthreads();  // the group's result takes the place of a member, which all have read by now
    if (merge.part == 0) {
      merge.store(output, row, step, mine, col);
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
    } else if (rows <= 2 * kGroups || Config::kBlockM <= 2 * kGroups) {
      merge_group<Config, 2>(output, group, smem);
    } else if constexpr (Config::kBlockM > 2 * kGroups) {
      merge_group<Config, 4>(output, group, smem);
    }
  }
}

}  // namespace flash::sm80
