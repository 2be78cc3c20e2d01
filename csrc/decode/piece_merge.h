// Merges the pieces that a tile's keys were cut into. The CTA that is done with its piece last does
// it, so there is no second launch, and no CTA waits.
#pragma once

#include "core/copy_async.h"
#include "core/merge_rounds.h"
#include "decode/merge.h"

namespace flash::decode {

// An atomicInc after which a CTA that counts later can read what this CTA stored before. The
// barrier before it orders these stores before this thread's release. All counts continue one
// release sequence, so the last CTA's acquire sees the stores of all, and its barrier passes them
// on to its threads. Fences on both sides would be sequentially consistent, which is not needed and
// costs 0.3 to 0.7 µs of a step on an H200.
__device__ inline uint32_t count_in_order(uint32_t* counter, uint32_t last) {
#if defined(__CUDA_ARCH__)
  uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
#else
  return atomicInc(counter, last);
#endif
}

// Whether all other members of the set have been here. Called by all threads, after each has done
// its writes. If it is true, the counter is as it was before the launch, and what the others have
// written can be read. One thread's order holds for all, because there are barriers before and
// after.
__device__ inline bool last_to_arrive(uint32_t* counter, int members) {
  __syncthreads();
  unsigned const last = members - 1;
  bool const is_last = threadIdx.x == 0 && count_in_order(counter, last) == last;
  return __syncthreads_or(is_last);
}

// One thread's part of a set's rows: four columns of a row, of one member after the other. A CTA
// runs this code once, at the end of a launch, so it is read from memory while it runs, and
// hundreds of instructions took longer than their work. Loops are therefore unrolled little here,
// and a queue in shared memory, not registers, hides latency.
template <class Config>
struct MemberColumns {
  using Storage = PieceMergeStorage<Config>;

  Storage& smem;
  float const* from;  // the first member's
  int64_t member;     // from one member to the next, in floats
  int members;

  // Loads as many members as the queue holds; a thread reads only what it has copied itself.
  __device__ void load(int first) const {
    int const end = min(members, first + Storage::kQueue);
#pragma unroll 2
    for (int m = first; m < end; ++m) {
      using CopyOp = SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>;  // from L2, past L1
      CopyOp::copy(*reinterpret_cast<uint128_t const*>(from + m * member),
                   *reinterpret_cast<uint128_t*>(&smem.queue[m - first][threadIdx.x]), true);
    }
    cp_async_fence();
  }

  // Softmax over the members of `row`, whose scores are their LSE and whose values are their rows.
  // Afterwards `out` is the unnormalised sum that the softmax's finish() scales.
  __device__ OnlineSoftmax<1> attend(int row, int rows, float (&out)[Storage::kColumns]) const {
    OnlineSoftmax<1> softmax(kLog2e);
    float const* const lse = smem.lse + row;
#pragma unroll 4
    for (int m = 0; m < members; ++m) {
      softmax.max[0] = fmaxf(softmax.max[0], lse[m * rows]);
    }
    for (int first = 0; first < members; first += Storage::kQueue) {
      if (first > 0) {
        load(first);
      }
      cp_async_wait<0>();
      compiler_fence();
      int const end = min(members, first + Storage::kQueue);
#pragma unroll 2
      for (int m = first; m < end; ++m) {
        // A NaN, which no maximum sees, enters the result here.
        float const weight = exp2_fast((lse[m * rows] - softmax.max[0]) * softmax.scale_log2);
        float4 const x = smem.queue[m - first][threadIdx.x];
        softmax.sum[0] += weight;
        out[0] += weight * x.x;
        out[1] += weight * x.y;
        out[2] += weight * x.z;
        out[3] += weight * x.w;
      }
    }
    return softmax;
  }
};

// Loads a set's LSE, by all threads; member m's begin at from + m * member.
template <class Config>
__device__ void read_lse(float const* from, int64_t member, int members, int rows,
                         PieceMergeStorage<Config>& smem) {
  constexpr int kEach = (kMergedRows + Config::kThreads - 1) / Config::kThreads;
  float const by_rows = reciprocal_fast(float(rows));
  float lse[kEach];  // all are loaded before the first is waited for
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    int const i = n * Config::kThreads + threadIdx.x;
    int const m = static_cast<int>((float(i) + 0.5f) * by_rows);  // i / rows, for i below 2^20
    // Loaded from L2: this SM's L1 may hold older numbers.
    lse[n] = m < members ? __ldcg(from + m * member + (i - m * rows)) : 0.f;
  }
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    int const i = n * Config::kThreads + threadIdx.x;
    if (i < members * rows) {
      smem.lse[i] = lse[n];
    }
  }
}

// Called by all threads. Each thread reads the same part of every member that it then writes of the
// result, so the result can take the place of a member.
template <class Config>
__device__ void merge_set(DecodeOutput<Config> const& output, MergeSet const& set,
                          PieceMergeStorage<Config>& smem) {
  using Storage = PieceMergeStorage<Config>;
  DecodeParams const& p = output.p;
  int const rows = output.work.tile.rows, columns = p.fwd.head_dim_v;
  int const col = Storage::kColumns * (threadIdx.x % Storage::kLanes);
  Piece const& piece = output.work.piece;
  int64_t const from = output.partial_row(piece, set.first, 0);
  int64_t const member = int64_t(set.stride) * piece.step * Config::kBlockM;
  MemberColumns<Config> const mine{smem, p.partial_out + from * columns + col, member * columns,
                                   set.count};
  auto const of_row = [&](int row) {
    MemberColumns<Config> in_row = mine;
    in_row.from += row * columns;
    return in_row;
  };
  int row = threadIdx.x / Storage::kLanes;
  bool const has_columns = col < columns;
  if (has_columns && row < rows) {
    of_row(row).load(0);
  }
  read_lse<Config>(p.partial_lse + from, member, set.count, rows, smem);
  __syncthreads();
  while (has_columns && row < rows) {
    float out[Storage::kColumns] = {};
    OnlineSoftmax<1> softmax = of_row(row).attend(row, rows, out);
    output.finish(row, col, softmax, out);
    row += Storage::kRows;
    if (row < rows) {
      of_row(row).load(0);
    }
  }
}

// Called after a piece has been stored in the workspace.
template <class Config>
__device__ void merge_pieces(DecodeParams const& p, DecodeWork<Config> const& work,
                             PieceMergeStorage<Config>& smem) {
  using Output = DecodeOutput<Config>;
  Piece const& piece = work.piece;
  int const rows = work.tile.rows;
  for (MergeRounds rounds(piece.count, piece.number, kMergedRows / rows); rounds.valid();
       rounds.next()) {
    MergeSet const set = rounds.set();
    if (set.count == 1) {
      continue;  // the set's result is already in its place
    }
    int64_t const counter = piece.first + int64_t(set.counter) * piece.step;
    if (!last_to_arrive(p.counters + counter, set.count)) {
      return;
    }
    Output const output{p, work, rounds.last() ? Output::kWhole : set.first};
    merge_set<Config>(output, set, smem);
  }
}

}  // namespace flash::decode
