// O of a segment with a vector of decays, chunk after chunk, from the state before the segment:
// step by step, O = scale (Q∘e^G) S + A V and S' = e^G_16 ∘ S + (K∘e^(G_16 − G))ᵀ V.
#pragma once

#include "sm80/linear/vector_weights.h"
#include "sm80/linear/walk_store.h"

namespace flash::sm80::linear {

template <class C>
struct VectorStorage {
  using Element = typename C::Element;
  template <class T>
  using Tiles = T[C::kHeads][C::kChunk * C::kK];

  // As they come. One chunk's: the next one's are asked for once these are in the tiles below.
  alignas(16) Tiles<Element> q, k;
  alignas(16) Tiles<float> g;
  alignas(16) Element v[2][C::kHeads][C::kChunk * C::kV];
  // scale Q times its decays from the step's begin; K to the step's end, and since its begin.
  alignas(16) Tiles<WideElement> query[2];
  alignas(16) Tiles<Element> keys;
  alignas(16) Tiles<WideElement> inverse[C::kKeyParts];
  alignas(16) uint4 weights[C::kHeads][C::kStrips][32];  // A, as operands
  alignas(16) float factors[C::kHeads][C::kStrips][C::kK];
  alignas(16) float4 parts[RowParts<C>::kSize];
  // The last chunk in which a step's sums went below kLeastSum.
  alignas(16) int exact[C::kHeads][4];
  alignas(16) int any_exact;
};

template <class C>
struct VectorOutputs {
  using Element = typename C::Element;

  VectorParams const& p;
  Walk<C> const& walk;
  VectorStorage<C>& smem;
  int number;  // of the chunk, in the walk's order

  __device__ bool is_exact(int strip) const { return smem.exact[walk.h][strip] == number; }

  // Q and K times their decays, by all threads.
  __device__ void prepare() const {
    Own<C> const own;
    if (own.head >= walk.heads()) {
      return;
    }
    StepSums<C> const sums(smem.g[own.head], p.forward.gate.fp32, own);
    set_factors(sums, own, smem.factors[own.head][own.strip]);
    if (!(sums.all.x >= kLeastSum && sums.all.y >= kLeastSum)) {
      smem.exact[own.head][own.strip] = number;
      smem.any_exact = number;
    }
    float2 const since = {exp2_fast(-sums.all.x - kKeyShift), exp2_fast(-sums.all.y - kKeyShift)};
#pragma unroll
    for (int t = 0; t < C::kOwn; ++t) {
      int const at = own.at(t);
      float2 const q = unpack<Element>(word(smem.q[own.head][at]));
      float2 const read = sums.reading(t);
      float const scale = p.scale.reads;
      split<WideElement>({q.x * (scale * read.x), q.y * (scale * read.y)},
                         word(smem.query[0][own.head][at]), word(smem.query[1][own.head][at]));
      float2 k = unpack<Element>(word(smem.k[own.head][at]));
      float2 const entering = sums.entering(t);
      k = {k.x * entering.x, k.y * entering.y};
      if constexpr (C::kReverse) {
        k = {k.x * p.scale.enters, k.y * p.scale.enters};
      }
      word(smem.keys[own.head][at]) = pack<Element>(k.x, k.y);
      k = {k.x * since.x, k.y * since.y};
      if constexpr (C::kKeyParts == 2) {
        split<WideElement>(k, word(smem.inverse[0][own.head][at]),
                           word(smem.inverse[1][own.head][at]));
      } else {
        word(smem.inverse[0][own.head][at]) = pack<WideElement>(k.x, k.y);
      }
    }
  }

  // A of the warp's steps, of those with or without sums below kLeastSum.
  template <bool kExact>
  __device__ void set_weights() const {
    constexpr int kWarps = C::kWarpsV * C::kWarpsK;  // of a head
    int const warp = walk.warp_k * C::kWarpsV + walk.column;
#pragma unroll 1
    for (int strip = warp; strip < C::kStrips; strip += kWarps) {
      if (is_exact(strip) != kExact) {
        continue;
      }
      float left[4] = {}, right[4] = {};
      float scale;
      if constexpr (kExact) {
        ExactWeights<C> const pairs{smem.q[walk.h], smem.k[walk.h], smem.g[walk.h], strip};
        pairs.cumulate(p.forward.gate.fp32);
        pairs.multiply_rows(left, right);
        scale = p.forward.scale;
      } else {
        operands().multiply_rows(strip, left, right);
        scale = 0x1p50f;
        static_assert(kKeyShift == 50.f);
      }
      smem.weights[walk.h][strip][walk.lane()] =
          as_weights<Element, C::kReverse>(left, right, scale);
    }
  }

  // Step by step: what the state gives to O, and the state after the step.
  __device__ void walk_along(WalkState<C>& state, WalkRows<C>& out) const {
    int const first_row = walk.warp_k * C::kRows, lane = thread_index_here() % 32;
#pragma unroll
    for (int step = 0; step < C::kStrips; ++step) {
      int const strip = C::kReverse ? C::kStrips - 1 - step : step;
      uint32_t v[4];
      read_values_across<C>(values(), strip, walk.column, lane, v);
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
          read_square<false, C::kK>(smem.query[part][walk.h], strip * 16, first_row + d,
                                    lanes_of_a(lane), rows);
          multiply<StateElement>(rows, s, out[strip][0], out[strip][1]);
        }
        step_rows<C>(smem.keys[walk.h], strip, smem.factors[walk.h][strip], v, first_row, d, lane,
                     state);
      }
    }
  }

  // What the steps' own tokens give to O, and O's way to memory.
  __device__ void finish(WalkRows<C>& out) const {
    if constexpr (C::kWarpsK > 1) {
      RowParts<C>{walk, smem.parts}.take(out);
    }
    int const lane = thread_index_here() % 32;
    RowStore<C> const target(walk, walk.chunk_in_order(number), lane);
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
      if (!walk.owns(strip)) {
        continue;
      }
      uint32_t v[4];
      read_square<true, C::kV>(values(), strip * 16, walk.column * C::kOfWarp,
                               lanes_of_b_transposed(lane), v);
      uint4 const w = smem.weights[walk.h][strip][lane];
      uint32_t const a[4] = {w.x, w.y, w.z, w.w};
      multiply<Element>(a, v, out[strip][0], out[strip][1]);
      target.store(strip, 0, out[strip][0], out[strip][1]);
    }
  }

 private:
  template <class T>
  __device__ static uint32_t& word(T& first) {
    return reinterpret_cast<uint32_t&>(first);
  }
  __device__ Element const* values() const { return smem.v[number % 2][walk.h]; }
  __device__ StepOperands<C> operands() const {
    StepOperands<C> of;
    of.query[0] = smem.query[0][walk.h];
    of.query[1] = smem.query[1][walk.h];
#pragma unroll
    for (int part = 0; part < C::kKeyParts; ++part) {
      of.key[part] = smem.inverse[part][walk.h];
    }
    return of;
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
  bool const first = walk.begins(), last = walk.ends();
  int const chunks = walk.segment.exists() ? walk.chunks() : 0;
  auto const load = [&](int number) {
    if (number < chunks) {
      auto const tokens = walk.chunk_in_order(number);
      load_heads<C, C::kK>(walk, tokens, p.q, p.group, 0, p.k_dim, p.aligned_k, smem.q);
      load_heads<C, C::kK>(walk, tokens, p.k, p.group, 0, p.k_dim, p.aligned_k, smem.k);
      load_gates(walk, tokens, vector, smem.g);
      load_heads<C, C::kV>(walk, tokens, p.v, 1, tile.v_begin, p.v_dim, p.aligned_v,
                           smem.v[number % 2]);
    }
    cp_async_fence();
  };
  load(0);
  if (threadIdx.x < 4 * C::kHeads) {
    smem.exact[threadIdx.x / 4][threadIdx.x % 4] = -1;
    smem.any_exact = -1;
  }
  WalkState<C> state = {};
  // A first segment needs nothing of the launches before, but to end after them.
  if (!first) {
    wait_for_launch_before();
  }
  if (walk.exists() && (chunks > 0 || last)) {
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
  // A chunk is finished after the next one's first barrier: A needs one after it is set.
#pragma unroll 1
  for (int number = 0;; ++number) {
    cp_async_wait<0>();
    __syncthreads();
    if (number > 0 && walk.exists()) {
      VectorOutputs<C>{vector, walk, smem, number - 1}.finish(out);
    }
    if (number == chunks) {
      break;
    }
    VectorOutputs<C> const outputs{vector, walk, smem, number};
    outputs.prepare();
    __syncthreads();
    if (smem.any_exact == number) {
      if (walk.exists()) {
        outputs.template set_weights<true>();
      }
      __syncthreads();
    }
    load(number + 1);
    if (walk.exists()) {
      outputs.template set_weights<false>();
      outputs.walk_along(state, out);
      if constexpr (C::kWarpsK > 1) {
        RowParts<C>{walk, smem.parts}.leave(out);
      }
    }
  }
  if (walk.exists() && last) {
    if constexpr (C::kReverse) {
      scale_state<C>(state, vector.scale.unit);
    }
    walk.write_final(state);
  }
  if (first) {
    wait_for_launch_before();
  }
}

}  // namespace flash::sm80::linear
