// What the kernels share that walk along a segment: chunk after chunk of 64 tokens, the state in
// registers from the first to the last. A warp has a few columns of V and all rows of K, so that a
// state is read where it is summed, and no warp needs another's.
#pragma once

#include "core/dynamic_smem.h"
#include "core/launch_order.h"
#include "sm80/linear/rows.h"
#include "sm80/linear/weights.h"

namespace flash::sm80::linear {

// kOfWarp: columns of V that a warp has. kHeads: heads of a CTA, side by side in memory.
template <class Element_, int kK_, int kOfWarp_, int kWarpsV_, int kHeads_>
struct WalkConfig {
  using Element = Element_;
  static constexpr int kChunk = 64, kStrips = kChunk / 16;
  static constexpr int kK = kK_, kOfWarp = kOfWarp_, kWarpsV = kWarpsV_, kHeads = kHeads_;
  static constexpr int kV = kOfWarp * kWarpsV;
  static constexpr int kThreads = 32 * kWarpsV * kHeads;
  static constexpr int kBlocks = kOfWarp / 16;                  // of a warp's columns
  static constexpr int kSquares = kStrips * (kStrips + 1) / 2;  // on the diagonal and below it
  // CTAs on an SM of 227 KiB, for which registers are left.
  static constexpr int kResident = kK >= 128 ? 2 : kK >= 64 ? 3 : 4;
};

// A square of A, a strip's 16 rows against an earlier strip's columns, or its own.
__device__ constexpr int square_of(int strip, int other) {
  return strip * (strip + 1) / 2 + other;
}

// Decays inside a chunk, by token.
template <int kChunk>
struct ChunkDecays {
  alignas(16) Cumulated cumulated[kChunk];
  alignas(16) float to_end[kChunk];      // of the token's strip
  alignas(16) float from_begin[kChunk];  // of the token's strip
  alignas(16) float before[kChunk];      // from the chunk's begin
  alignas(16) float left[kChunk];        // at the chunk's end

  // By a warp.
  __device__ void set(flash::linear::LogDecays<kChunk> const& logs) {
    flash::linear::cumulate<kChunk>(logs, cumulated);
    __syncwarp();
    StripDecays const decay{cumulated};
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      int const t = i * 32 + threadIdx.x % 32;
      to_end[t] = decay.to_end(t);
      from_begin[t] = decay.from_begin(t);
      before[t] = decay_between({0.f, 0}, cumulated[t]);
      left[t] = decay_between(cumulated[t], cumulated[kChunk - 1]);
    }
  }
  // What is left of the state before the chunk.
  __device__ float total() const { return before[kChunk - 1]; }
};

// Stateᵀ of a warp, (kOfWarp, kK), as accumulators: of 16 columns of V and 8 rows of K each.
template <class C>
using WalkState = float[C::kBlocks][C::kK / 8][4];

// Where the CTA is, and what this warp has of it.
template <class C>
struct Walk {
  using Element = typename C::Element;
  ForwardParams const& p;
  Tile tile;
  flash::linear::Chunk segment;
  int h = threadIdx.x / 32 / C::kWarpsV;       // head of the CTA
  int column = threadIdx.x / 32 % C::kWarpsV;  // warp along V

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int head() const { return tile.head + h; }
  __device__ int heads() const {
    int const left = p.heads - tile.head;
    return left < C::kHeads ? left : C::kHeads;
  }
  __device__ bool exists() const { return head() < p.heads; }
  // The warp that computes its head's decays.
  __device__ bool has_decays() const { return column == 0 && exists(); }
  __device__ int chunks() const {
    return flash::linear::chunks_of(segment.tokens.count, C::kChunk);
  }
  __device__ flash::linear::Tokens chunk(int number) const {
    auto const& all = segment.tokens;
    int const begin = number * C::kChunk, left = all.count - begin;
    return {all.batch, all.row + begin, left < C::kChunk ? left : C::kChunk};
  }
  __device__ flash::linear::LogDecays<C::kChunk> logs(int number) const {
    return flash::linear::log_decays<C::kChunk, Element>(p.gate, chunk(number), head());
  }

  // Starts to bring a chunk's rows of q or k.
  __device__ void load_k(TensorView<void const> const& x, int number,
                         Element (&out)[C::kHeads][C::kChunk * C::kK]) const {
    auto const tokens = chunk(number);
    for (int of = 0; of < heads(); ++of) {
      load_tile<C::kChunk, C::kK, C::kThreads>(
          rows_of<Element>(x, tokens, (tile.head + of) / p.group, 0), x.row_stride, out[of],
          tokens.count, p.k_dim, p.aligned_k);
    }
  }
  __device__ void load_v(int number, Element (&out)[C::kHeads][C::kChunk * C::kV]) const {
    auto const tokens = chunk(number);
    for (int of = 0; of < heads(); ++of) {
      load_tile<C::kChunk, C::kV, C::kThreads>(
          rows_of<Element>(p.v, tokens, tile.head + of, tile.v_begin), p.v.row_stride, out[of],
          tokens.count, p.v_dim - tile.v_begin, p.aligned_v);
    }
  }

  // Calls use(number, k, v) for the numbers of a warp's state, of the tensor's rows and columns.
  template <class Use>
  __device__ void for_state(WalkState<C>& state, Use use) const {
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < C::kK / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const v = tile.v_begin + column * C::kOfWarp + m * 16 + e / 2 * 8 + lane() / 4;
          int const k = n * 8 + lane() % 4 * 2 + e % 2;
          if (k < p.k_dim && v < p.v_dim) {
            use(state[m][n][e], k, v);
          }
        }
      }
    }
  }
  __device__ void read_initial(WalkState<C>& state) const {
    if (p.initial.ptr) {
      for_state(state, [&](float& x, int k, int v) {
        x = *p.initial.at(segment.sequence, head(), k, v);
      });
    }
  }
  __device__ void write_final(WalkState<C>& state) const {
    if (p.final.ptr) {
      for_state(state, [&](float& x, int k, int v) {
        *p.final.at(segment.sequence, head(), k, v) = x;
      });
    }
  }

  // Where launches leave each other the state of a segment: as registers have it.
  __device__ float4* state_of_slot(TileGrid const& grid, int slot) const {
    constexpr int kOfTile = C::kK * C::kV / 4, kOfHere = C::kBlocks * C::kK / 8 * 32;
    int64_t const number =
        (int64_t(slot) * p.heads + head()) * grid.tiles_v + tile.v_begin / C::kV;
    return reinterpret_cast<float4*>(p.workspace.sums) + number * kOfTile + column * kOfHere +
           lane();
  }
};

// state = what is left of it and (V ∘ left)ᵀ K of a strip of tokens. v: the strip's, as the operand
// B of 16 columns each.
template <class C>
__device__ void add_keys(typename C::Element const* tile_k, int strip,
                         uint32_t const (&v)[C::kBlocks][4], float const* left,
                         WalkState<C>& state) {
  using Element = typename C::Element;
  int const own = strip * 16 + threadIdx.x % 4 * 2;  // tokens of this lane
  float2 const near = *reinterpret_cast<float2 const*>(&left[own]);
  float2 const far = *reinterpret_cast<float2 const*>(&left[own + 8]);
  // B of 16 columns is the operand A of its transpose, in another order.
  uint32_t a[C::kBlocks][4];
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
    a[m][0] = decayed<Element>(v[m][0], near);
    a[m][1] = decayed<Element>(v[m][2], near);
    a[m][2] = decayed<Element>(v[m][1], far);
    a[m][3] = decayed<Element>(v[m][3], far);
  }
#pragma unroll
  for (int n = 0; n < C::kK; n += 16) {
    uint32_t k[4];
    read_b_deep<C::kK>(tile_k, strip * 16, n, k);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
      multiply<Element>(a[m], k, state[m][n / 8], state[m][n / 8 + 1]);
    }
  }
}

template <class C>
__device__ void read_values(typename C::Element const* tile_v, int strip, int column,
                            uint32_t (&v)[C::kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
    read_b_deep<C::kV>(tile_v, strip * 16, column * C::kOfWarp + m * 16, v[m]);
  }
}

template <class C>
__device__ void scale_state(WalkState<C>& state, float factor) {
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < C::kK / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        state[m][n][e] *= factor;
      }
    }
  }
}

}  // namespace flash::sm80::linear
