// O = scale (Q∘e^G) S0 + A V of each chunk, where K has several tiles, A is in memory, and so are
// the states before chunks. A warp has a strip of 16 rows.
#pragma once

#include "sm80/linear/weights.h"

namespace flash::sm80::linear {

template <class C>
struct OutputsStorage {
  using Element = typename C::Element;
  // A warp reads its rows of Q to the end before it puts those of O there, kStaged columns at a
  // time.
  static constexpr int kStaged = C::kK < C::kV ? C::kK : C::kV;
  alignas(16) Element q_or_out[C::kChunk * C::kK];
  alignas(16) Element v[C::kChunk * C::kV];
  alignas(16) StateElement state[C::kK * C::kV];
  alignas(16) Cumulated cumulated[C::kChunk];
};

template <class C>
struct Strip {
  using Element = typename C::Element;
  static constexpr bool kSplitsQ = !std::is_same_v<Element, StateElement>;
  ForwardParams const& p;
  OutputsStorage<C>& smem;
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
      read_a<C::kK>(smem.q_or_out, index * 16, d, q);
      if constexpr (kSplitsQ) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split<StateElement>(unpack<Element>(q[i]), q[i], rest[i]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kV; n += 16) {
        read_b_deep<C::kV>(smem.state, d, n, s);
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
      read_b_deep<C::kV>(smem.v, strip * 16, n, v);
      multiply<Element>(weights, v, out[n / 8], out[n / 8 + 1]);
    }
  }

  // Rows' factors come last, so that they are applied once.
  __device__ void add_chunk() {
    int const lane = threadIdx.x % 32;
    bool const decays = p.gate.ptr;
    StripDecays const decay{smem.cumulated};
    float const before = decay.before(index) * p.scale;
    scale_rows(before, before);
    float const near = decays ? decay.from_begin(index * 16 + lane / 4) : 1.f;
    float const far = decays ? decay.from_begin(index * 16 + lane / 4 + 8) : 1.f;
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
  }

  // Rows leave through shared memory, where the warp alone reads and writes them.
  __device__ void store(flash::linear::Tokens const& tokens, int v_begin) {
    constexpr int kStaged = OutputsStorage<C>::kStaged;
    int const lane = threadIdx.x % 32;
    Element* const rows = smem.q_or_out + index * 16 * C::kK;
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
          Element* const row = rows + offset_in_tile<kStaged>(half * 8 + lane / 4, n);
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
__global__ void __launch_bounds__(C::kThreads)
    outputs_kernel(__grid_constant__ ForwardParams const p,
                   __grid_constant__ LinearTiles const grid) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<OutputsStorage<C>*>(dynamic_smem());
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  auto const chunk = flash::linear::chunk_of(p.sequences, tile.slot);
  if (!chunk.exists()) {
    return;
  }
  static_assert(C::kTiled && C::kHeads == 1 && C::kWarps == C::kStrips);
  auto const& tokens = chunk.tokens;
  int const head = tile.head, warp = threadIdx.x / 32;
  auto const load_q = [&](int k_begin) {
    load_tile<C::kChunk, C::kK, C::kThreads>(rows_of<Element>(p.q, tokens, head / p.group, k_begin),
                                             p.q.row_stride, smem.q_or_out, tokens.count,
                                             p.k_dim - k_begin, p.aligned_k);
    load_state<C>(p, tile.slot, head, k_begin, tile.v_begin, smem.state);
  };
  load_q(0);
  load_tile<C::kChunk, C::kV, C::kThreads>(rows_of<Element>(p.v, tokens, head, tile.v_begin),
                                           p.v.row_stride, smem.v, tokens.count,
                                           p.v_dim - tile.v_begin, p.aligned_v);
  cp_async_fence();
  if (warp == 0) {
    flash::linear::cumulate<C::kChunk, Element>(p.gate, tokens, head, smem.cumulated);
  }
  cp_async_wait<0>();
  __syncthreads();

  Strip<C> strip{p, smem, warp, tile.slot, head};
  for (int k_begin = 0; k_begin < p.k_dim; k_begin += C::kK) {
    if (k_begin > 0) {
      __syncthreads();
      load_q(k_begin);
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
}

}  // namespace flash::sm80::linear
