// O = scale (Q∘e^G) S0 + A V of each chunk. A warp has a strip of 16 rows.
#pragma once

#include "sm80/linear/weights.h"

namespace flash::sm80::linear {

template <class C>
struct OutputsStorage {
  using Element = typename C::Element;
  // A warp reads its rows of Q to the end before it puts those of O there, kStaged columns at a
  // time.
  static constexpr int kStaged = C::kK < C::kV ? C::kK : C::kV;
  alignas(16) Element q_or_out[C::kHeads][C::kChunk * C::kK];
  alignas(16) Element k[C::kHeads][C::kTiled ? 8 : C::kChunk * C::kK];
  alignas(16) Element v[C::kHeads][C::kChunk * C::kV];
  alignas(16) StateElement state[C::kHeads][C::kK * C::kV];
  alignas(16) Cumulated cumulated[C::kHeads][C::kChunk];
  alignas(16) float to_end[C::kHeads][C::kChunk];
};

template <class C>
struct Strip {
  using Element = typename C::Element;
  static constexpr bool kSplitsQ = !std::is_same_v<Element, StateElement>;
  ForwardParams const& p;
  OutputsStorage<C>& smem;
  int h;      // head of the CTA
  int index;  // of the chunk
  int slot;
  int head;
  float out[C::kV / 8][4] = {};

  // out *= what the strip's rows are to be multiplied by
  __device__ void scale_rows(float near, float far) {
#pragma unroll
    for (int n = 0; n < C::kV / 8; ++n) {
      out[n][0] *= near;
      out[n][1] *= near;
      out[n][2] *= far;
      out[n][3] *= far;
    }
  }

  // out += Q S0, of a tile of K. The 11 bits of Q in fp16 are two numbers of bf16.
  __device__ void add_state() {
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t q[4], rest[4], s[4];
      read_a<C::kK>(smem.q_or_out[h], index * 16, d, q);
      if constexpr (kSplitsQ) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split<StateElement>(unpack<Element>(q[i]), q[i], rest[i]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kV; n += 16) {
        read_b_deep<C::kV>(smem.state[h], d, n, s);
        multiply<StateElement>(q, s, out[n / 8], out[n / 8 + 1]);
        if constexpr (kSplitsQ) {
          multiply<StateElement>(rest, s, out[n / 8], out[n / 8 + 1]);
        }
      }
    }
  }

  // out += the weights' square * V of a strip
  __device__ void add_values(uint32_t const (&weights)[4], int strip) {
#pragma unroll
    for (int n = 0; n < C::kV; n += 16) {
      uint32_t v[4];
      read_b_deep<C::kV>(smem.v[h], strip * 16, n, v);
      multiply<Element>(weights, v, out[n / 8], out[n / 8 + 1]);
    }
  }

  // Q Kᵀ of a strip of keys
  __device__ void scores(int strip, float (&left)[4], float (&right)[4]) const {
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      uint32_t q[4], k[4];
      read_a<C::kK>(smem.q_or_out[h], index * 16, d, q);
      read_b<C::kK>(smem.k[h], strip * 16, d, k);
      multiply<Element>(q, k, left, right);
    }
  }

  // Rows' factors come last, so that they are applied once.
  __device__ void add_chunk() {
    int const lane = threadIdx.x % 32;
    bool const decays = p.gate.ptr;
    StripDecays const decay{smem.cumulated[h]};
    float const before = decay.before(index) * p.scale;
    scale_rows(before, before);
    float const near = decays ? decay.from_begin(index * 16 + lane / 4) : 1.f;
    float const far = decays ? decay.from_begin(index * 16 + lane / 4 + 8) : 1.f;
    if constexpr (C::kTiled) {
      uint4 const* const weights =
          p.workspace.weights +
          ((int64_t(slot) * p.heads + head) * C::kStrips + index) * C::kStrips * 32 + lane;
      auto const add = [&](int strip) {
        uint4 const w = __ldcg(weights + strip * 32);
        uint32_t const a[4] = {w.x, w.y, w.z, w.w};
        add_values(a, strip);
      };
      for (int strip = 0; strip < index; ++strip) {
        add(strip);
      }
      scale_rows(near, far);
      add(index);
    } else {
      uint32_t a[4];
      for (int strip = 0; strip < index; ++strip) {
        float left[4] = {}, right[4] = {};
        scores(strip, left, right);
        float const between = decays ? decay.between(strip, index) * p.scale : p.scale;
        scale_square(left, right, between, smem.to_end[h] + strip * 16, lane);
        as_a<Element>(left, right, a);
        add_values(a, strip);
      }
      scale_rows(near, far);
      float left[4] = {}, right[4] = {};
      scores(index, left, right);
      scale_diagonal(left, right, p.scale, decays, smem.cumulated[h] + index * 16, lane);
      as_a<Element>(left, right, a);
      add_values(a, index);
    }
  }

  // Rows leave through shared memory, where the warp alone reads and writes them.
  __device__ void store(flash::linear::Tokens const& tokens, int v_begin) {
    constexpr int kStaged = OutputsStorage<C>::kStaged;
    int const lane = threadIdx.x % 32;
    Element* const rows = smem.q_or_out[h] + index * 16 * C::kK;
    Element* const target =
        rows_of<Element>(p.o, tokens, head, v_begin) + index * 16 * p.o.row_stride;
#pragma unroll
    for (int begin = 0; begin < C::kV; begin += kStaged) {
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kStaged / 8; ++n) {
        float const(&own)[4] = out[begin / 8 + n];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Element* const row = rows + place<kStaged>(half * 8 + lane / 4, n);
          *reinterpret_cast<uint32_t*>(row + lane % 4 * 2) =
              pack<Element>(own[2 * half], own[2 * half + 1]);
        }
      }
      __syncwarp();
      store_strip<16, kStaged>(target + begin, p.o.row_stride, rows, tokens.count - index * 16,
                               p.v_dim - v_begin - begin, p.aligned_v);
    }
  }
};

template <class C>
__device__ void load_state(ForwardParams const& p, int slot, int head, int k_begin, int v_begin,
                           StateElement* smem) {
  auto const* state = static_cast<StateElement const*>(p.workspace.states) +
                      (int64_t(slot) * p.heads + head) * p.state_size();
  int const columns = p.v_columns();
  load_tile<C::kK, C::kV, C::kThreads>(state + int64_t(k_begin) * columns + v_begin, columns, smem,
                                       p.k_dim - k_begin, columns - v_begin, /*aligned=*/true);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    outputs_kernel(__grid_constant__ ForwardParams const p, __grid_constant__ TileGrid const grid) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<OutputsStorage<C>*>(dynamic_smem());
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  auto const chunk = flash::linear::chunk_of(p.sequences, tile.slot);
  if (!chunk.exists()) {
    return;
  }
  auto const& tokens = chunk.tokens;
  int const heads = heads_in<C>(p, tile), warp = threadIdx.x / 32;
  auto const load_q = [&](int h, int k_begin) {
    load_tile<C::kChunk, C::kK, C::kThreads>(
        rows_of<Element>(p.q, tokens, (tile.head + h) / p.group, k_begin), p.q.row_stride,
        smem.q_or_out[h], tokens.count, p.k_dim - k_begin, p.aligned_k);
    load_state<C>(p, tile.slot, tile.head + h, k_begin, tile.v_begin, smem.state[h]);
  };
  for (int h = 0; h < heads; ++h) {
    int const head = tile.head + h;
    load_q(h, 0);
    if constexpr (!C::kTiled) {
      load_tile<C::kChunk, C::kK, C::kThreads>(rows_of<Element>(p.k, tokens, head / p.group, 0),
                                               p.k.row_stride, smem.k[h], tokens.count, p.k_dim,
                                               p.aligned_k);
    }
    load_tile<C::kChunk, C::kV, C::kThreads>(rows_of<Element>(p.v, tokens, head, tile.v_begin),
                                             p.v.row_stride, smem.v[h], tokens.count,
                                             p.v_dim - tile.v_begin, p.aligned_v);
  }
  cp_async_fence();
  for (int h = warp; h < heads; h += C::kWarps) {
    flash::linear::cumulate<C::kChunk, Element>(p.gate, tokens, tile.head + h, smem.cumulated[h]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * C::kChunk; i += C::kThreads) {
    int const h = i / C::kChunk, t = i % C::kChunk;
    smem.to_end[h][t] = StripDecays{smem.cumulated[h]}.to_end(t);
  }
  cp_async_wait<0>();
  __syncthreads();

  if constexpr (C::kTiled) {
    static_assert(C::kHeads == 1 && C::kWarps == C::kStrips);
    Strip<C> strip{p, smem, 0, warp, tile.slot, tile.head};
    for (int k_begin = 0; k_begin < p.k_dim; k_begin += C::kK) {
      if (k_begin > 0) {
        __syncthreads();
        load_q(0, k_begin);
        cp_async_fence();
        cp_async_wait<0>();
        __syncthreads();
      }
      strip.add_state();
    }
    if (warp * 16 < tokens.count) {
      strip.add_chunk();
      strip.store(tokens, tile.v_begin);
    }
  } else {
    for (int item = warp; item < heads * C::kStrips; item += C::kWarps) {
      int const h = item / C::kStrips, index = item % C::kStrips;
      if (index * 16 < tokens.count) {
        Strip<C> strip{p, smem, h, index, tile.slot, tile.head + h};
        strip.add_state();
        strip.add_chunk();
        strip.store(tokens, tile.v_begin);
      }
    }
  }
}

}  // namespace flash::sm80::linear
