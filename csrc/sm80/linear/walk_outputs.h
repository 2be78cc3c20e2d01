// O = scale (Q∘e^G) S0 + A V of a segment, chunk after chunk, from the state before the segment.
#pragma once

#include "sm80/linear/walk_store.h"

namespace flash::sm80::linear {

template <class C>
struct WalkStorage {
  using Element = typename C::Element;
  alignas(16) Element q[2][C::kHeads][C::kChunk * C::kK];
  alignas(16) Element k[2][C::kHeads][C::kChunk * C::kK];
  alignas(16) Element v[2][C::kHeads][C::kChunk * C::kV];
  // A, as operands; or, where warps share the rows of K, their parts of Q Kᵀ as accumulators.
  alignas(16) uint4 weights[C::kHeads][C::kSquares][C::kWarpsK == 1 ? 1 : 2 * C::kWarpsK][32];
  // Their parts of Q S0, for the warps that have the strips.
  static constexpr int kParts = C::kWarpsK == 1 ? 1 : C::kWarps * C::kStrips * 2 * C::kBlocks * 32;
  alignas(16) float4 parts[kParts];
  ChunkDecays<C::kChunk> decays[2][C::kHeads];
};

template <class C>
struct WalkOutputs {
  using Element = typename C::Element;
  using Storage = WalkStorage<C>;
  using Out = float[C::kStrips][2 * C::kBlocks][4];

  Walk<C> const& walk;
  Storage& smem;
  int buffer;

  __device__ ForwardParams const& p() const { return walk.p; }
  __device__ ChunkDecays<C::kChunk> const& decays() const { return smem.decays[buffer][walk.h]; }
  __device__ Element const* q() const { return smem.q[buffer][walk.h]; }
  __device__ Element const* k() const { return smem.k[buffer][walk.h]; }
  __device__ Element const* v() const { return smem.v[buffer][walk.h]; }

  // The squares of A that the warp computes: first those on the diagonal, then the others.
  __device__ void set_weights() const {
    constexpr int kWarps = C::kWarpsV, kOthers = C::kSquares - C::kStrips;
    int const warp = walk.column;
    // Warps without a square on the diagonal begin with the others.
    int const first = (warp + kWarps - C::kStrips % kWarps) % kWarps;
#pragma unroll
    for (int n = 0; n < (C::kStrips + kWarps - 1) / kWarps; ++n) {
      int const strip = n * kWarps + warp;
      if (C::kStrips % kWarps == 0 || strip < C::kStrips) {
        set_weights<true>(strip, strip);
      }
    }
#pragma unroll
    for (int n = 0; n < (kOthers + kWarps - 1) / kWarps; ++n) {
      int const other = n * kWarps + first;
      if (kOthers % kWarps == 0 || other < kOthers) {
        int const strip = strip_below(other);
        set_weights<false>(strip, other - strip * (strip - 1) / 2);
      }
    }
  }

  // A of a strip's rows and another one's columns, or, on the diagonal, its own.
  template <bool kDiagonal>
  __device__ void set_weights(int strip, int other) const {
    float left[4] = {}, right[4] = {};
#pragma unroll
    for (int d = 0; d < C::kRows; d += 16) {
      uint32_t rows[4], columns[4];
      read_a<C::kK>(q(), strip * 16, walk.warp_k * C::kRows + d, rows);
      read_b<C::kK>(k(), other * 16, walk.warp_k * C::kRows + d, columns);
      multiply<Element>(rows, columns, left, right);
    }
    auto& square = smem.weights[walk.h][square_of(strip, other)];
    if constexpr (C::kWarpsK == 1) {
      uint32_t a[4];
      weigh<kDiagonal>(strip, other, left, right);
      as_a<Element>(left, right, a);
      square[0][walk.lane()] = {a[0], a[1], a[2], a[3]};
    } else {
      auto* const part = reinterpret_cast<float4*>(square[2 * walk.warp_k]) + walk.lane();
      part[0] = {left[0], left[1], left[2], left[3]};
      part[32] = {right[0], right[1], right[2], right[3]};
    }
  }

  // Q Kᵀ becomes A.
  template <bool kDiagonal>
  __device__ void weigh(int strip, int other, float (&left)[4], float (&right)[4]) const {
    int const lane = walk.lane();
    auto const& factor = decays();
    if constexpr (kDiagonal) {
      scale_diagonal(left, right, p().scale, factor.cumulated + strip * 16, lane);
    } else {
      float const near = factor.from_begin[strip * 16 + lane / 4];
      float const far = factor.from_begin[strip * 16 + lane / 4 + 8];
      float const between = StripDecays{factor.cumulated}.between(other, strip) * p().scale;
      scale_square(left, right, between, factor.to_end + other * 16, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        left[i] *= near;
        left[i + 2] *= far;
        right[i] *= near;
        right[i + 2] *= far;
      }
    }
  }

  // A's square as an operand.
  template <bool kDiagonal>
  __device__ void read_weights(int strip, int other, uint32_t (&a)[4]) const {
    auto const& square = smem.weights[walk.h][square_of(strip, other)];
    if constexpr (C::kWarpsK == 1) {
      uint4 const w = square[0][walk.lane()];
      a[0] = w.x;
      a[1] = w.y;
      a[2] = w.z;
      a[3] = w.w;
    } else {
      float left[4] = {}, right[4] = {};
#pragma unroll
      for (int warp_k = 0; warp_k < C::kWarpsK; ++warp_k) {
        auto const* part = reinterpret_cast<float4 const*>(square[2 * warp_k]) + walk.lane();
        add_part(part[0], left);
        add_part(part[32], right);
      }
      weigh<kDiagonal>(strip, other, left, right);
      as_a<Element>(left, right, a);
    }
  }

  // out = scale (Q∘e^G) S0 of the warp's columns and rows of K
  __device__ void read_state(WalkState<C> const& state, Out& out) const {
#pragma unroll
    for (int d = 0; d < C::kRows; d += 16) {
      uint32_t s[C::kBlocks][4];
#pragma unroll
      for (int m = 0; m < C::kBlocks; ++m) {
        float const(&near)[4] = state[m][d / 8];
        float const(&far)[4] = state[m][d / 8 + 1];
        s[m][0] = pack<StateElement>(near[0], near[1]);
        s[m][1] = pack<StateElement>(far[0], far[1]);
        s[m][2] = pack<StateElement>(near[2], near[3]);
        s[m][3] = pack<StateElement>(far[2], far[3]);
      }
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        uint32_t rows[4];
        read_a<C::kK>(q(), strip * 16, walk.warp_k * C::kRows + d, rows);
        AgainstState<Element> const against(rows);
#pragma unroll
        for (int m = 0; m < C::kBlocks; ++m) {
          against.multiply_by(s[m], out[strip][2 * m], out[strip][2 * m + 1]);
        }
      }
    }
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      float const near = decays().before[strip * 16 + walk.lane() / 4] * p().scale;
      float const far = decays().before[strip * 16 + walk.lane() / 4 + 8] * p().scale;
#pragma unroll
      for (int n = 0; n < 2 * C::kBlocks; ++n) {
        out[strip][n][0] *= near;
        out[strip][n][1] *= near;
        out[strip][n][2] *= far;
        out[strip][n][3] *= far;
      }
    }
  }

  // Where the warps along K put their parts of a strip's sums.
  __device__ float4* parts(int strip, int warp_k) const {
    int const warp = (walk.h * C::kWarpsK + warp_k) * C::kWarpsV + walk.column;
    return smem.parts + (warp * C::kStrips + strip) * 2 * C::kBlocks * 32 + walk.lane();
  }
  __device__ void leave_parts(Out const& out) const {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        float4* const part = parts(strip, walk.warp_k);
#pragma unroll
        for (int n = 0; n < 2 * C::kBlocks; ++n) {
          float const(&x)[4] = out[strip][n];
          part[n * 32] = {x[0], x[1], x[2], x[3]};
        }
      }
    }
  }
  // In the order of the warps, but that the own part comes first.
  __device__ void take_parts(Out& out) const {
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      for (int after = 1; walk.owns(strip) && after < C::kWarpsK; ++after) {
        float4 const* const part = parts(strip, (walk.warp_k + after) % C::kWarpsK);
#pragma unroll
        for (int n = 0; n < 2 * C::kBlocks; ++n) {
          add_part(part[n * 32], out[strip][n]);
        }
      }
    }
  }

  // out += A V, and the state becomes the one after the chunk.
  __device__ void add_chunk(WalkState<C>& state, Out& out) const {
    scale_state<C>(state, decays().total());
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      uint32_t values[C::kBlocks][4];
      read_values<C>(v(), strip, walk.column, values);
#pragma unroll
      for (int later = strip; later < C::kStrips; ++later) {
        if (!walk.owns(later)) {
          continue;
        }
        uint32_t a[4];
        if (later == strip) {
          read_weights<true>(later, strip, a);
        } else {
          read_weights<false>(later, strip, a);
        }
#pragma unroll
        for (int m = 0; m < C::kBlocks; ++m) {
          multiply<Element>(a, values[m], out[later][2 * m], out[later][2 * m + 1]);
        }
      }
      add_keys<C>(k(), strip, walk.warp_k * C::kRows, values, decays().left, state);
    }
  }

  __device__ void store(Out const& out, flash::linear::Tokens const& tokens) const {
    int const lane = walk.lane();
    int const first = walk.tile.v_begin + walk.column * C::kOfWarp + lane % 4 / 2 * 8;
    int const row = lane % 2 * 8 + lane / 4;
    Element* const target =
        rows_of<Element>(p().o, tokens, walk.head(), first) + row * p().o.row_stride;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        continue;
      }
#pragma unroll
      for (int m = 0; m < C::kBlocks; ++m) {
        uint32_t words[4];
        as_a<Element>(out[strip][2 * m], out[strip][2 * m + 1], words);
        uint4 const run = runs_of_rows(words);
        if (strip * 16 + row < tokens.count) {
          store_run(p(), target + strip * 16 * p().o.row_stride + m * 16,
                    p().v_dim - first - m * 16, run);
        }
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    walk_outputs_kernel(__grid_constant__ ForwardParams const p,
                        __grid_constant__ LinearTiles const grid) {
  auto& smem = *reinterpret_cast<WalkStorage<C>*>(dynamic_smem());
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{p, tile, flash::linear::chunk_of(p.sequences, tile.slot)};
  bool const first = walk.segment.index == 0, last = walk.segment.last;
  int const chunks = walk.segment.exists() ? walk.chunks() : 0;
  auto queries = tiles_of_k(walk, p.q);
  auto keys = tiles_of_k(walk, p.k);
  auto values = tiles_of_v(walk);
  auto const load = [&](int number) {
    if (number < chunks) {
      int const rows = walk.chunk(number).count;
      queries.load(rows, smem.q[number % 2]);
      keys.load(rows, smem.k[number % 2]);
      values.load(rows, smem.v[number % 2]);
    }
    cp_async_fence();
  };
  load(0);
  if (walk.has_decays() && chunks > 0) {
    smem.decays[0][walk.h].set(walk.logs(0));
  }
  WalkState<C> state = {};
  // A first segment needs nothing of the launches before, but to end after them.
  if (!first) {
    wait_for_launch_before();
  }
  if (walk.exists() && (chunks > 0 || last)) {
    if (first) {
      walk.read_initial(state);
    } else {
      walk.read_slot(grid, tile.slot, state);
    }
  }
#pragma unroll 1
  for (int number = 0; number < chunks; ++number) {
    cp_async_wait<0>();
    __syncthreads();
    load(number + 1);
    bool const sets = walk.has_decays() && number + 1 < chunks;
    auto const logs = sets ? walk.logs(number + 1) : flash::linear::LogDecays<C::kChunk>{};
    WalkOutputs<C> const outputs{walk, smem, number % 2};
    typename WalkOutputs<C>::Out out = {};
    if (walk.exists()) {
      outputs.set_weights();
      outputs.read_state(state, out);
      if constexpr (C::kWarpsK > 1) {
        outputs.leave_parts(out);
      }
    }
    if (sets) {
      smem.decays[(number + 1) % 2][walk.h].set(logs);
    }
    __syncthreads();
    if (walk.exists()) {
      if constexpr (C::kWarpsK > 1) {
        outputs.take_parts(out);
      }
      outputs.add_chunk(state, out);
      outputs.store(out, walk.chunk(number));
    }
  }
  if (walk.exists() && last) {
    walk.write_final(state);
  }
  if (first) {
    wait_for_launch_before();
  }
}

}  // namespace flash::sm80::linear
