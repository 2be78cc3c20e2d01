// Outputs of a chunk: how warps that share the rows of K add up theirs, and how they are stored.
// walk_outputs.h has RowParts and RowStore as functions of its own: by these, its kernel of K 512
// spills more.
#pragma once

#include "sm80/linear/walk.h"

namespace flash::sm80::linear {

// O of a warp's columns of V, by strips.
template <class C>
using WalkRows = float[C::kStrips][2 * C::kBlocks][4];

__device__ inline void add_part(float4 const& part, float (&sums)[4]) {
  sums[0] += part.x;
  sums[1] += part.y;
  sums[2] += part.z;
  sums[3] += part.w;
}

// Where the warps along K put their parts of a strip's sums, for the one that has the strip.
template <class C>
struct RowParts {
  static constexpr int kSize = C::kWarpsK == 1 ? 1 : C::kWarps * C::kStrips * 2 * C::kBlocks * 32;

  Walk<C> const& walk;
  float4* const all;  // [kSize]

  __device__ void leave(WalkRows<C> const& out) const {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        float4* const part = of(strip, walk.warp_k);
#pragma unroll
        for (int n = 0; n < 2 * C::kBlocks; ++n) {
          float const(&x)[4] = out[strip][n];
          part[n * 32] = {x[0], x[1], x[2], x[3]};
        }
      }
    }
  }
  // In the order of the warps, but that the own part comes first.
  __device__ void take(WalkRows<C>& out) const {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      for (int after = 1; walk.owns(strip) && after < C::kWarpsK; ++after) {
        float4 const* const part = of(strip, (walk.warp_k + after) % C::kWarpsK);
#pragma unroll
        for (int n = 0; n < 2 * C::kBlocks; ++n) {
          add_part(part[n * 32], out[strip][n]);
        }
      }
    }
  }

 private:
  __device__ float4* of(int strip, int warp_k) const {
    int const warp = (walk.h * C::kWarpsK + warp_k) * C::kWarpsV + walk.column;
    return all + (warp * C::kStrips + strip) * 2 * C::kBlocks * 32 + walk.lane();
  }
};

// Words of four lanes that share a row, as_a's, become 16 bytes of one row each: lane l of the four
// has row l % 2 * 8 of the 16, and columns l / 2 * 8 to l / 2 * 8 + 7.
__device__ inline uint4 runs_of_rows(uint32_t (&words)[4]) {
  int const lane = threadIdx.x % 4;
  auto const exchange = [&](uint32_t& low, uint32_t& high, int distance) {
    bool const upper = lane & distance;
    uint32_t const other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    (upper ? low : high) = other;
  };
  exchange(words[0], words[1], 1);
  exchange(words[2], words[3], 1);
  exchange(words[0], words[2], 2);
  exchange(words[1], words[3], 2);
  return {words[0], words[1], words[2], words[3]};
}

// Eight columns of a row of O, of which `left` exist.
template <class Element>
__device__ void store_run(ForwardParams const& p, Element* to, int left, uint4 const& run) {
  if (p.aligned_v) {
    if (left > 0) {
      *reinterpret_cast<uint4*>(to) = run;
    }
    return;
  }
  uint32_t const words[4] = {run.x, run.y, run.z, run.w};
#pragma unroll
  for (int e = 0; e < kRunElements; ++e) {
    if (e < left) {
      to[e] = Element::bitcast(static_cast<uint16_t>(words[e / 2] >> e % 2 * 16));
    }
  }
}

// A run of a square of 16 x 16: its row, and its first column.
struct RunPlace {
  int row, column;

  // The run that runs_of_rows gives a lane.
  __device__ static RunPlace of(int lane) {
    return {lane % 2 * 8 + lane / 4, lane % 4 / 2 * kRunElements};
  }
};

// Where a warp's outputs go: 16 rows of a strip and 16 columns of V at a time.
template <class C>
struct RowStore {
  using Element = typename C::Element;

  ForwardParams const& p;
  int const columns;  // that exist from this lane's first one on
  int const row;      // of a strip's, this lane's
  int rows;           // that exist of the chunk's
  Element* target;

  // place: of the lane's run.
  __device__ RowStore(Walk<C> const& walk, flash::linear::Tokens const& tokens, RunPlace place)
      : RowStore(walk, tokens, place.row,
                 walk.tile.v_begin + walk.column * C::kOfWarp + place.column) {}

  // To the walk's next chunk, which has so many rows.
  __device__ void advance(int count) {
    rows = count;
    target += (C::kReverse ? -C::kChunk : C::kChunk) * p.o.row_stride;
  }

  __device__ void store(int strip, int block, float const (&left)[4],
                        float const (&right)[4]) const {
    uint32_t words[4];
    as_a<Element>(left, right, words);
    store(strip, block, runs_of_rows(words));
  }
  __device__ void store(int strip, int block, uint4 const& run) const {
    if (strip * 16 + row < rows) {
      store_run(p, target + strip * 16 * p.o.row_stride + block * 16, columns - block * 16, run);
    }
  }

 private:
  __device__ RowStore(Walk<C> const& walk, flash::linear::Tokens const& tokens, int row, int first)
      : p(walk.p),
        columns(p.v_dim - first),
        row(row),
        rows(tokens.count),
        target(rows_of<Element>(p.o, tokens, walk.head(), first) + row * p.o.row_stride) {}
};

}  // namespace flash::sm80::linear
