// dQ, and in reverse dK, of a segment with a vector of decays, chunk after chunk, from the state
// before the segment, or its gradient after it. Step by step of 16 tokens
//   dQ = scale e^G ∘ (dO Sᵀ + tril(dO Vᵀ) (e^−G ∘ K))
//   S' = e^G_16 ∘ S + (K ∘ e^(G_16 − G))ᵀ V
// and in reverse the same with K, V, Q, dO and dS in the place of Q, dO, K, V and S.
#pragma once

#include "sm80/linear/vector_gradient_column.h"

namespace flash::sm80::linear {

// How launches leave each other the states before segments: as StatePlace of vector_sums_kernel.
struct SegmentStates {
  int k_tile;
  int v_tile;
  int rows;  // of K, of a warp
  int tiles_v;

  __device__ int64_t at(int64_t state, int k, int v) const {
    int const square = (k / rows * (v_tile / 16) + v % v_tile / 16) * (rows / 8) + k % rows / 8;
    int const lane = v % 8 * 4 + k % 8 / 2, number = v % 16 / 8 * 2 + k % 2;
    int64_t const squares = k_tile / 8 * (v_tile / 16);
    return (((state * tiles_v + v / v_tile) * squares + square) * 32 + lane) * 4 + number;
  }
};

// A warp's state: 16 rows of K, accumulators of 8 columns of V each.
template <class C>
using GradientState = float[2 * C::kBlocks][4];

template <class C>
struct VectorGradients {
  using Element = typename C::Element;

  VectorGradientsParams const& p;
  Walk<C> const& walk;
  VectorGradientsStorage<C>& smem;
  LinearTiles const& grid;
  int number;  // of the chunk, from the segment's begin

  using Saved = uint4[C::kBlocks];  // of the state before a step

  __device__ ForwardParams const& forward() const { return p.walk.forward; }

  // ---- the state -------------------------------------------------------------------------------

  __device__ void begin(SegmentStates const& segments, GradientState<C>& state) const {
    int const lane = walk.lane();
    int64_t const slot = int64_t(walk.tile.slot) * forward().heads + walk.head();
    float const factor = 1.f / p.walk.scale.unit;
#pragma unroll
    for (int n = 0; n < 2 * C::kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const k = walk.tile.k_begin + walk.warp_k * 16 + lane / 4 + e / 2 * 8;
        int const v = walk.tile.v_begin + walk.column * C::kOfWarp + n * 8 + lane % 4 * 2 + e % 2;
        if (k >= forward().k_dim || v >= forward().v_dim) {
          continue;
        }
        if (!walk.begins()) {
          state[n][e] = __ldcg(forward().workspace.sums + segments.at(slot, k, v));
        } else if (forward().initial.ptr) {
          state[n][e] = factor * *forward().initial.at(walk.segment.sequence, walk.head(), k, v);
        }
      }
    }
  }

  // Where dQ's launch leaves the state before a step to dK's.
  __device__ uint4* saved(int strip) const {
    flash::linear::Sequences steps = forward().sequences;
    steps.chunk = 16;
    int64_t const step = flash::linear::first_slot(steps, walk.segment.sequence) +
                         walk.segment.index * (forward().sequences.chunk / 16) +
                         number * C::kStrips + strip;
    int64_t const tile =
        ((step * forward().heads + walk.head()) * grid.tiles_k + walk.tile.k_begin / C::kK) *
            grid.tiles_v +
        walk.tile.v_begin / C::kV;
    constexpr int kParts = C::kWarpsK * C::kWarpsV * C::kBlocks;
    int const part = (walk.warp_k * C::kWarpsV + walk.column) * C::kBlocks;
    return p.states + (tile * kParts + part) * 32 + walk.lane();
  }

  // ---- a chunk ---------------------------------------------------------------------------------

  // What enters the state times its decays, and the state's factors, by all threads.
  __device__ void prepare(typename VectorGradientsStorage<C>::Keys const& keys) const {
    OwnColumn<C> const own;
    if (!own.exists(walk.heads())) {
      return;
    }
    ColumnSums<C> const sums(keys.g[own.head], forward().gate.fp32, own);
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      int const at = own.at_own(n);
      float const factor = p.walk.scale.enters * sums.entering(own.pick(sums.until, n));
      float const x = static_cast<float>(keys.k[own.head][at]) * factor;
      Element const nearest(x);
      smem.entering[0][own.head][at] = nearest;
      smem.entering[1][own.head][at] = Element(x - static_cast<float>(nearest));
    }
    if (!own.odd) {
      smem.factors[own.head][own.strip][own.column] = exp2_fast(sums.all());
    }
  }

  // Products of the step's tokens: 0 of those that have not entered yet.
  __device__ void set_pairs() const {
    int const warp = threadIdx.x / 32, lane = walk.lane();
#pragma unroll 1
    for (int item = warp; item < C::kHeads * C::kStrips; item += C::kWarps) {
      int const head = item / C::kStrips, strip = item % C::kStrips;
      if (head >= walk.heads()) {
        continue;
      }
      float left[4] = {}, right[4] = {};
#pragma unroll 4
      for (int d = 0; d < C::kV; d += 16) {
        uint32_t rows[4], columns[4];
        read_a<C::kV>(smem.reading[head], strip * 16, d, rows);
        read_b<C::kV>(smem.v[head], strip * 16, d, columns);
        multiply<Element>(rows, columns, left, right);
      }
      mask_triangle<C::kReverse>(left, right);
      auto& pairs = smem.pairs[head][strip];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const row = &pairs[half * 8 + lane / 4][lane % 4 * 2];
        *reinterpret_cast<float2*>(row) = {left[2 * half], left[2 * half + 1]};
        *reinterpret_cast<float2*>(row + 8) = {right[2 * half], right[2 * half + 1]};
      }
    }
  }

  // dK's launch asks for what dQ's has left of a step before it needs it.
  __device__ void ask_for(int step, Saved& before) const {
    if (C::kReverse && p.dg && step < steps()) {
      uint4 const* const states = saved(strip_of(step));
#pragma unroll
      for (int m = 0; m < C::kBlocks; ++m) {
        before[m] = __ldcg(states + m * 32);
      }
    }
  }

  // before: of the first step.
  __device__ void walk_along(Saved& before, GradientState<C>& state) const {
#pragma unroll 1
    for (int step = 0; step < steps(); ++step) {
      read_state(strip_of(step), before, state);
      ask_for(step + 1, before);
      update_state(strip_of(step), state);
    }
  }

 private:
  // A step without tokens has no place in memory.
  __device__ int steps() const { return flash::linear::chunks_of(walk.chunk(number).count, 16); }
  __device__ int strip_of(int step) const { return C::kReverse ? steps() - 1 - step : step; }

  // What the state gives, and its part in the gates' gradient. The state is two numbers of 16 bits,
  // because where one pair of tokens makes all of a gate's gradient, its digits are the state's.
  __device__ void read_state(int strip, Saved const& before, GradientState<C> const& state) const {
    int const lane = walk.lane();
    float left[4] = {}, right[4] = {}, near = 0.f, far = 0.f;
    uint4* const states = !C::kReverse && p.dg ? saved(strip) : nullptr;
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
      float const(&first)[4] = state[2 * m];
      float const(&second)[4] = state[2 * m + 1];
      if (C::kReverse && p.dg) {
        uint4 const& other = before[m];
        near += dot(other.x, first[0], first[1]) + dot(other.y, second[0], second[1]);
        far += dot(other.z, first[2], first[3]) + dot(other.w, second[2], second[3]);
      }
      uint32_t s[4], rest[4];
      split<StateElement>({first[0], first[1]}, s[0], rest[0]);
      split<StateElement>({second[0], second[1]}, s[1], rest[1]);
      split<StateElement>({first[2], first[3]}, s[2], rest[2]);
      split<StateElement>({second[2], second[3]}, s[3], rest[3]);
      if (!C::kReverse && p.dg) {
        states[m * 32] = {s[0], s[1], s[2], s[3]};
      }
      uint32_t rows[4];
      read_a<C::kV>(smem.reading[walk.h], strip * 16, walk.column * C::kOfWarp + m * 16, rows);
      AgainstState<Element> const against(rows);
      against.multiply_by(s, left, right);
      multiply<StateElement>(against.nearest, rest, left, right);
    }
    auto& sums = smem.sums[walk.h][walk.column];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const row = &sums[strip * 16 + half * 8 + lane / 4][walk.warp_k * 16 + lane % 4 * 2];
      *reinterpret_cast<float2*>(row) = {left[2 * half], left[2 * half + 1]};
      *reinterpret_cast<float2*>(row + 8) = {right[2 * half], right[2 * half + 1]};
    }
    if (C::kReverse && p.dg) {
      near = sum_of_row(near);
      far = sum_of_row(far);
      float* const kept = &smem.kept[walk.h][walk.column][strip][walk.warp_k * 16 + lane / 4];
      if (lane % 4 == 0) {
        kept[0] = near;
        kept[8] = far;
      }
    }
  }
  __device__ static float dot(uint32_t pair, float x, float y) {
    float2 const other = unpack<StateElement>(pair);
    return other.x * x + other.y * y;
  }

  __device__ void update_state(int strip, GradientState<C>& state) const {
    int const lane = walk.lane();
    float const* const factors = &smem.factors[walk.h][strip][walk.warp_k * 16 + lane / 4];
    float const near = factors[0], far = factors[8];
    uint32_t keys[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      read_a_deep<C::kK>(smem.entering[part][walk.h], strip * 16, walk.warp_k * 16, keys[part]);
    }
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
      float (&first)[4] = state[2 * m];
      float (&second)[4] = state[2 * m + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        first[e] *= e / 2 ? far : near;
        second[e] *= e / 2 ? far : near;
      }
      uint32_t values[4];
      read_b_deep<C::kV>(smem.v[walk.h], strip * 16, walk.column * C::kOfWarp + m * 16, values);
      multiply<Element>(keys[0], values, first, second);
      multiply<Element>(keys[1], values, first, second);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    vector_gradients_kernel(__grid_constant__ VectorGradientsParams const p,
                            __grid_constant__ LinearTiles const grid,
                            __grid_constant__ SegmentStates const segments) {
  auto& smem = *reinterpret_cast<VectorGradientsStorage<C>*>(dynamic_smem());
  VectorParams const& vector = p.walk;
  ForwardParams const& f = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{f, tile, flash::linear::chunk_of(f.sequences, tile.slot)};
  if (!walk.segment.exists()) {
    return;
  }
  int const chunks = walk.chunks();
  auto const load_values = [&](int number) {
    if (number < chunks) {
      auto const tokens = walk.chunk_in_order(number);
      load_heads<C, C::kV>(walk, tokens, f.v, 1, tile.v_begin, f.v_dim, f.aligned_v, smem.v);
      load_heads<C, C::kV>(walk, tokens, p.reading, 1, tile.v_begin, f.v_dim, f.aligned_v,
                           smem.reading);
    }
    cp_async_fence();
  };
  auto const load_keys = [&](int number) {
    if (number < chunks) {
      auto const tokens = walk.chunk_in_order(number);
      auto& keys = smem.keys[number % 2];
      load_heads<C, C::kK>(walk, tokens, f.k, f.group, tile.k_begin, f.k_dim, f.aligned_k, keys.k);
      load_heads<C, C::kK>(walk, tokens, f.q, f.group, tile.k_begin, f.k_dim, f.aligned_k,
                           keys.own);
      load_gates(walk, vector, first_gate(walk, tokens, vector), tokens.count, keys.g);
    }
    cp_async_fence();
  };
  load_values(0);
  load_keys(0);
  GradientState<C> state = {};
  if (walk.exists()) {
    VectorGradients<C>{p, walk, smem, grid, 0}.begin(segments, state);
  }
#pragma unroll 1
  for (int number = 0; number < chunks; ++number) {
    VectorGradients<C> const gradients{p, walk, smem, grid,
                                       C::kReverse ? chunks - 1 - number : number};
    auto const& keys = smem.keys[number % 2];
    cp_async_wait<0>();
    __syncthreads();
    load_keys(number + 1);
    typename VectorGradients<C>::Saved before;
    gradients.prepare(keys);
    if (walk.exists()) {
      gradients.ask_for(0, before);
    }
    __syncthreads();
    // A few warps' work, beside the others' steps.
    gradients.set_pairs();
    if (walk.exists()) {
      gradients.walk_along(before, state);
    }
    __syncthreads();
    load_values(number + 1);
    OwnColumn<C> const own;
    if (own.exists(walk.heads())) {
      GradientColumn<C>{p, walk, smem, keys, own, walk.chunk_in_order(number)}.finish();
    }
  }
}

}  // namespace flash::sm80::linear
