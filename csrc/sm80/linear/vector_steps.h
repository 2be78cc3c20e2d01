// The steps of 16 tokens of a chunk: what the state before a step gives to O, and the state after
// it, O = scale (Q∘e^G) S + A V and S' = e^G_16 ∘ S + (K∘e^(G_16 − G))ᵀ V. Each warp multiplies for
// itself; sm90/linear has the same for four warps together.
#pragma once

#include "sm80/linear/vector_stream.h"
#include "sm80/linear/walk_store.h"

namespace flash::sm80::linear {

template <class C>
struct VectorSteps {
  using Element = typename C::Element;
  // The part of a CTA's shared memory that it needs for storing O.
  struct Storage {};

  Walk<C> const& walk;

  __device__ explicit VectorSteps(Walk<C> const& walk) : walk(walk) {}

  // The run of a square of O that a lane stores.
  __device__ static RunPlace place(int lane) { return RunPlace::of(lane); }

  // The state alone.
  template <class Stage>
  __device__ void sum(Stage const& chunk, WalkState<C>& state) const {
    VectorKeys<C> const& keys = chunk.keys(walk.h);
    int const lane = thread_index_here() % 32;
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = walk.strip_in_order(step);
      uint32_t v[4];
      read_values_across(chunk.values(walk.h), strip, lane, v);
#pragma unroll
      for (int d = 0; d < C::kRows; d += 16) {
        enter(keys, strip, v, d, lane, state);
      }
    }
  }

  // And what it gives to O.
  template <class Stage>
  __device__ void walk_along(Stage const& chunk, WalkState<C>& state, WalkRows<C>& out) const {
    VectorFactors<C> const& factors = chunk.factors(walk.h);
    int const lane = thread_index_here() % 32;
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = walk.strip_in_order(step);
      uint32_t v[4];
      read_values_across(chunk.values(walk.h), strip, lane, v);
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
          FactorTile<C>::template read_square<false>(own_rows(factors.query[part]), strip * 16, d,
                                                     lanes_of_a(lane), rows);
          multiply<StateElement>(rows, s, out[strip][0], out[strip][1]);
        }
        enter(factors.keys, strip, v, d, lane, state);
      }
    }
  }

  // What the steps' own tokens give to O, and O's way to memory.
  template <class Stage>
  __device__ void finish(Stage const& chunk, RowStore<C> const& target, WalkRows<C>& out,
                         Storage&) const {
    VectorFactors<C> const& factors = chunk.factors(walk.h);
    int const lane = thread_index_here() % 32;
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        continue;
      }
      uint32_t v[4], a[4];
      read_square<true, C::kV>(chunk.values(walk.h), strip * 16, walk.column * C::kOfWarp,
                               lanes_of_b_transposed(lane), v);
      read_square<false, 16>(factors.weights[strip], 0, 0, lanes_of_a(lane), a);
      multiply<Element>(a, v, out[strip][0], out[strip][1]);
      target.store(strip, 0, out[strip][0], out[strip][1]);
    }
  }

 private:
  // A tile of factors, from the warp's first row of K on: its columns.
  template <class T>
  __device__ T const* own_rows(T const* tile) const {
    return tile + walk.warp_k * C::kRows * C::kChunk;
  }
  // A step's V as the operand A of Vᵀ K.
  __device__ void read_values_across(Element const* values, int strip, int lane,
                                     uint32_t (&v)[4]) const {
    read_square<true, C::kV>(values, strip * 16, walk.column * C::kOfWarp,
                             lanes_of_a_transposed(lane), v);
  }
  // The state's rows from `row` on, 16 of a warp's: what is left of them and Vᵀ K of a step.
  __device__ void enter(VectorKeys<C> const& keys, int strip, uint32_t const (&v)[4], int row,
                        int lane, WalkState<C>& state) const {
    float (&near)[4] = state[0][row / 8];
    float (&far)[4] = state[0][row / 8 + 1];
    float4 const left = decays_of_rows(keys.decays[strip], walk.warp_k * C::kRows + row, lane);
    uint32_t k[4];
    FactorTile<C>::template read_square<true>(own_rows(keys.rows), strip * 16, row,
                                              lanes_of_b_transposed(lane), k);
    decay_rows(left, near, far);
    multiply<Element>(v, k, near, far);
  }
};

}  // namespace flash::sm80::linear
