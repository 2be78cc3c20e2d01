// O of a segment with a vector of decays, chunk after chunk, from the state before the segment:
// step by step, O = scale (Q∘e^G) S + A V and S' = e^G_16 ∘ S + (K∘e^(G_16 − G))ᵀ V.
#pragma once

#include "sm80/linear/vector_factors.h"
#include "sm80/linear/walk_store.h"

namespace flash::sm80::linear {

template <class C>
struct VectorStorage {
  VectorStage<C, VectorFactors<C>> stages[C::kStages];
  alignas(16) float4 parts[RowParts<C>::kSize];
};

// A chunk's outputs.
template <class C>
struct VectorOutputs {
  using Element = typename C::Element;

  Walk<C> const& walk;
  VectorFactors<C> const& factors;
  Element const* const values;

  // Step by step: what the state gives to O, and the state after the step.
  __device__ void walk_along(WalkState<C>& state, WalkRows<C>& out) const {
    int const first_row = walk.warp_k * C::kRows, lane = thread_index_here() % 32;
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = C::kReverse ? C::kStrips - 1 - step : step;
      uint32_t v[4];
      read_values_across<C>(values, strip, walk.column, lane, v);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          out[strip][n][e] = 0.f;
        }
      }
#pragma unroll
      for (int d = 0; d < C::kRows; d += 16) {
        float const(&near)[4] = state[0][d / 8];
        float const(&far)[4] = state[0][d / 8 + 1];
        uint32_t const s[4] = {
            pack<StateElement>(near[0], near[1]), pack<StateElement>(far[0], far[1]),
            pack<StateElement>(near[2], near[3]), pack<StateElement>(far[2], far[3])};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t rows[4];
          read_square<false, C::kK>(factors.query[part], strip * 16, first_row + d,
                                    lanes_of_a(lane), rows);
          multiply<StateElement>(rows, s, out[strip][0], out[strip][1]);
        }
        step_rows<C>(factors.keys, strip, factors.factors[strip], v, first_row, d, lane, state);
      }
    }
  }

  // What the steps' own tokens give to O, and O's way to memory.
  __device__ void finish(RowStore<C> const& target, WalkRows<C>& out) const {
    int const lane = thread_index_here() % 32;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        continue;
      }
      uint32_t v[4];
      read_square<true, C::kV>(values, strip * 16, walk.column * C::kOfWarp,
                               lanes_of_b_transposed(lane), v);
      uint4 const w = factors.weights[strip][lane];
      uint32_t const a[4] = {w.x, w.y, w.z, w.w};
      multiply<Element>(a, v, out[strip][0], out[strip][1]);
      target.store(strip, 0, out[strip][0], out[strip][1]);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    vector_outputs_kernel(__grid_constant__ VectorParams const vector,
                          __grid_constant__ LinearTiles const grid) {
  auto& smem = *reinterpret_cast<VectorStorage<C>*>(dynamic_smem());
  ForwardParams const& p = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{p, tile, flash::linear::chunk_of(p.sequences, tile.slot)};
  wait_for_launch_before();
  bool const first = walk.begins(), last = walk.ends();
  VectorStream<C, VectorFactors<C>> stream(walk, smem.stages);
  stream.begin();
  WalkState<C> state = {};
  if (has_head(walk) && (stream.chunks > 0 || last)) {
    if (first) {
      walk.read_initial(state);
      if constexpr (C::kReverse) {
        scale_state<C>(state, 1.f / vector.scale.unit);
      }
    } else {
      walk.read_slot(grid, tile.slot, state);
    }
  }
  WalkRows<C> out;
  RowStore<C> target(walk, walk.chunk_in_order(0), walk.lane());
#pragma unroll 1
  for (int number = 0; number < stream.chunks; ++number) {
    auto const& chunk = stream.next();
    VectorOutputs<C> const outputs{walk, chunk.factors[walk.h], chunk.v[walk.h]};
    if (has_head(walk)) {
      outputs.walk_along(state, out);
    }
    if constexpr (C::kWarpsK > 1) {
      RowParts<C> const parts{walk, smem.parts};
      if (has_head(walk)) {
        parts.leave(out);
      }
      __syncthreads();
      if (has_head(walk)) {
        parts.take(out);
      }
    }
    if (has_head(walk)) {
      outputs.finish(target, out);
    }
    target.advance(walk.chunk_in_order(number + 1).count);
  }
  if (has_head(walk) && last) {
    if constexpr (C::kReverse) {
      scale_state<C>(state, vector.scale.unit);
    }
    walk.write_final(state);
  }
}

}  // namespace flash::sm80::linear
