// The gated delta rule along a sequence, chunk after chunk, the state in registers. With the state
// S0 before a chunk, and T, A of DeltaFactors,
//
//   U = T (V − (K∘e^G) S0)      O = scale (Q∘e^G) S0 + A U      S' = e^(G_C) S0 + (K∘e^(G_C − G))ᵀ
//   U
//
// A warp has 16 columns of V and all rows of K, as in walk.h. R = V − …, U and the state are kept
// transposed: as accumulators they have the places of the operand A of the next product, and of the
// operand B of O's, so that no number goes through shared memory.
#pragma once

#include "core/early_launch.h"
#include "sm80/linear/delta_config.h"

namespace flash::sm80::linear {

constexpr flash::linear::WalkTiling walk_tiling(DeltaTiling const& tiling) {
  return {tiling.k_tile, kDeltaChunk, 16, tiling.warps, 1, 1, 0, 2};
}

template <class Element, int kTiling>
struct DeltaConfig : WalkShape<Element, walk_tiling(flash::linear::kDeltaTilings[kTiling])> {
  static constexpr int kStages = flash::linear::kDeltaTilings[kTiling].stages;
};

// A chunk.
template <class C>
struct DeltaStage {
  using Element = typename C::Element;
  PanelTile<C::kK, Element> q;
  PanelTile<C::kK, Element> k;
  alignas(16) Element v[kDeltaChunk * C::kV];
  alignas(16) DeltaFactors factors;

  __device__ void load_tokens(Walk<C> const& walk, flash::linear::Tokens const& tokens) {
    ForwardParams const& p = walk.p;
    q.template load<C::kThreads>(p, p.q, tokens, walk.tile.head / p.group);
    k.template load<C::kThreads>(p, p.k, tokens, walk.tile.head / p.group);
    load_tile<kDeltaChunk, C::kV, C::kThreads>(
        rows_of<Element>(p.v, tokens, walk.tile.head, walk.tile.v_begin), p.v.row_stride, v,
        tokens.count, p.v_dim - walk.tile.v_begin, p.aligned_v);
  }
  __device__ void load_factors(DeltaFactors const& source) {
    static_assert(sizeof(DeltaFactors) % sizeof(uint128_t) == 0);
    auto const* from = reinterpret_cast<uint128_t const*>(&source);
    auto* to = reinterpret_cast<uint128_t*>(&factors);
    for (int i = threadIdx.x; i < int(sizeof(DeltaFactors) / sizeof(uint128_t)); i += C::kThreads) {
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(from[i], to[i], true);
    }
  }
};

// 16 columns of V of a chunk's tokens: transposed, as accumulators of 8 tokens, and by strips.
using DeltaColumns = float[2 * kDeltaStrips][4];
using DeltaRows = float[kDeltaStrips][2][4];

__device__ inline void as_operand(uint4 const& words, uint32_t (&out)[4]) {
  out[0] = words.x;
  out[1] = words.y;
  out[2] = words.z;
  out[3] = words.w;
}

template <class C>
struct DeltaOutputs {
  using Element = typename C::Element;

  Walk<C> const& walk;
  DeltaStage<C> const& chunk;

  // out = Q S0, read = (K S0)ᵀ
  __device__ void read_state(WalkState<C> const& state, DeltaRows& out, DeltaColumns& read) const {
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t s[4];
      as_a<StateElement>(state[0][d / 8], state[0][d / 8 + 1], s);
      uint32_t const as_b[4] = {s[0], s[2], s[1], s[3]};
#pragma unroll
      for (int strip = 0; strip < kDeltaStrips; ++strip) {
        uint32_t rows[4];
        chunk.k.as_b(strip * 16, d, rows);
        AgainstState<Element> const keys(rows);
        multiply<StateElement>(s, keys.nearest, read[2 * strip], read[2 * strip + 1]);
        if constexpr (AgainstState<Element>::kSplits) {
          multiply<StateElement>(s, keys.rest, read[2 * strip], read[2 * strip + 1]);
        }
        chunk.q.as_a(strip * 16, d, rows);
        AgainstState<Element>(rows).multiply_by(as_b, out[strip][0], out[strip][1]);
      }
    }
  }

  // out = scale e^G ∘ out, by rows
  __device__ void decay_rows(DeltaRows& out) const {
#pragma unroll
    for (int strip = 0; strip < kDeltaStrips; ++strip) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const factor = chunk.factors.reads_q[strip * 16 + walk.lane() / 4 + e / 2 * 8];
        out[strip][0][e] *= factor;
        out[strip][1][e] *= factor;
      }
    }
  }

  // What V has and the state has not: Rᵀ = (V − e^G ∘ K S0)ᵀ of a strip, as the operand A.
  __device__ void missing(DeltaColumns const& read, int strip, uint32_t (&a)[4]) const {
    uint32_t v[4];
    read_b_deep<C::kV>(chunk.v, strip * 16, walk.column * 16, v);
    float const* const reads = chunk.factors.reads_k + strip * 16 + walk.lane() % 4 * 2;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      // Words of V are B's, those of R A's: the two in the middle change places.
      float2 const value = unpack<Element>(v[word / 2 + word % 2 * 2]);
      float2 const decay = *reinterpret_cast<float2 const*>(reads + word / 2 * 8);
      float const* const of_state = &read[2 * strip + word / 2][word % 2 * 2];
      a[word] = pack<Element>(value.x - decay.x * of_state[0], value.y - decay.y * of_state[1]);
    }
  }

  // Uᵀ = (T R)ᵀ of a strip, as accumulators of its first and last 8 tokens.
  __device__ void set_values(uint32_t const (&r)[kDeltaStrips][4], int strip, float (&near)[4],
                             float (&far)[4]) const {
#pragma unroll
    for (int other = 0; other <= strip; ++other) {
      uint32_t b[4];
      as_operand(chunk.factors.inverse[square_of(strip, other)][walk.lane()], b);
      multiply<Element>(r[other], b, near, far);
    }
  }

  // out += A U, of the columns that are a strip.
  __device__ void add_values(float const (&near)[4], float const (&far)[4], int strip,
                             DeltaRows& out) const {
    uint32_t const b[4] = {pack<Element>(near[0], near[1]), pack<Element>(far[0], far[1]),
                           pack<Element>(near[2], near[3]), pack<Element>(far[2], far[3])};
#pragma unroll
    for (int later = strip; later < kDeltaStrips; ++later) {
      uint32_t a[4];
      as_operand(chunk.factors.weights[square_of(later, strip)][walk.lane()], a);
      multiply<Element>(a, b, out[later][0], out[later][1]);
    }
  }

  // state += (U ∘ enters)ᵀ K of a strip
  __device__ void add_keys(float const (&near)[4], float const (&far)[4], int strip,
                           WalkState<C>& state) const {
    float const* const enters = chunk.factors.enters + strip * 16 + walk.lane() % 4 * 2;
    float2 const of_near = *reinterpret_cast<float2 const*>(enters);
    float2 const of_far = *reinterpret_cast<float2 const*>(enters + 8);
    uint32_t const a[4] = {pack<Element>(near[0] * of_near.x, near[1] * of_near.y),
                           pack<Element>(near[2] * of_near.x, near[3] * of_near.y),
                           pack<Element>(far[0] * of_far.x, far[1] * of_far.y),
                           pack<Element>(far[2] * of_far.x, far[3] * of_far.y)};
#pragma unroll
    for (int n = 0; n < C::kK; n += 16) {
      uint32_t k[4];
      chunk.k.as_b_deep(strip * 16, n, k);
      multiply<Element>(a, k, state[0][n / 8], state[0][n / 8 + 1]);
    }
  }

  // out = scale (Q∘e^G) S0 + A U, and the state becomes the one after the chunk.
  __device__ void advance(WalkState<C>& state, DeltaRows& out) const {
    uint32_t r[kDeltaStrips][4];
    {
      DeltaColumns read = {};
      read_state(state, out, read);
#pragma unroll
      for (int strip = 0; strip < kDeltaStrips; ++strip) {
        missing(read, strip, r[strip]);
      }
    }
    decay_rows(out);
    scale_state<C>(state, chunk.factors.total.x);
#pragma unroll
    for (int strip = 0; strip < kDeltaStrips; ++strip) {
      float near[4] = {}, far[4] = {};
      set_values(r, strip, near, far);
      add_values(near, far, strip, out);
      add_keys(near, far, strip, state);
    }
  }
};

// A CTA's place: a sequence's whole walk is one segment of Walk's.
template <class C>
__device__ Walk<C> delta_walk(ForwardParams const& p, LinearTiles const& grid) {
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, 1);
  int const sequence = tile.slot;
  return {p, tile, {sequence, 0, true, flash::linear::tokens_of(p.sequences, sequence)}};
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    delta_walk_kernel(__grid_constant__ DeltaParams const params,
                      __grid_constant__ LinearTiles const grid) {
  auto* const stages = reinterpret_cast<DeltaStage<C>*>(dynamic_smem());
  ForwardParams const& p = params.forward;
  Walk<C> const walk = delta_walk<C>(p, grid);
  int const chunks = walk.chunks();
  DeltaFactors const* const factors =
      params.factors +
      int64_t(flash::linear::first_slot(p.sequences, walk.segment.sequence)) * p.heads +
      walk.tile.head;
  auto const load = [&](int number) {
    if (number < chunks) {
      DeltaStage<C>& stage = stages[number % C::kStages];
      stage.load_tokens(walk, walk.chunk(number));
      stage.load_factors(factors[int64_t(number) * p.heads]);
    }
    cp_async_fence();
  };
  WalkState<C> state = {};
  walk.read_initial(state);
  wait_for_launch_before();
  load(0);
#pragma unroll 1
  for (int number = 0; number < chunks; ++number) {
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (C::kStages > 1) {
      load(number + 1);
    }
    DeltaOutputs<C> const outputs{walk, stages[number % C::kStages]};
    DeltaRows out = {};
    outputs.advance(state, out);
    RowStore<C> const rows(walk, walk.chunk(number), RunPlace::of(walk.lane()));
#pragma unroll
    for (int strip = 0; strip < kDeltaStrips; ++strip) {
      rows.store(strip, 0, out[strip][0], out[strip][1]);
    }
    if constexpr (C::kStages == 1) {
      __syncthreads();
      load(number + 1);
    }
  }
  walk.write_final(state);
}

}  // namespace flash::sm80::linear
