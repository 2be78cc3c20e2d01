// What each chunk adds to the state, (K∘e^{G_C − G})ᵀ V, and the scan over the chunks of a
// sequence. In reverse: what it adds to the state's gradient, scale (Q∘e^G)ᵀ dO, from q and dO in
// the place of k and v.
#pragma once

#include "core/dynamic_smem.h"
#include "linear/decay.h"
#include "sm80/linear/accumulator_rows.h"

namespace flash::sm80::linear {

using flash::linear::Cumulated;
using flash::linear::decay_between;

template <class C>
struct StatesStorage {
  alignas(16) typename C::Element k[C::kHeads][C::kChunk * C::kK];
  alignas(16) typename C::Element v[C::kHeads][C::kChunk * C::kV];
  alignas(16) Cumulated cumulated[C::kHeads][C::kChunk];
  alignas(16) float left[C::kHeads][C::kChunk];  // of a token at the border that the state is at
};

// Rows and columns of a tile's state that a warp sums at a time. Few heads of few rows are cut
// along V, so that each warp has some.
template <class C>
struct StateOfWarp {
  static constexpr int kStrips = C::kK / 16;
  static constexpr int kParts = C::kHeads * kStrips < C::kWarps ? 2 : 1;
  static constexpr int kColumns = C::kV / kParts;
  static constexpr int kItems = kStrips * kParts;
  static_assert(kColumns % 16 == 0);
  int row;
  int column;

  __device__ explicit StateOfWarp(int item)
      : row(item % kStrips * 16), column(item / kStrips * kColumns) {}

  // Calls use(n, half, row, column) for numbers 2 half and 2 half + 1 of the lane's accumulator n.
  template <class Use>
  __device__ void for_pairs(Use use) const {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        use(n, half, row + half * 8 + lane / 4, column + n * 8 + lane % 4 * 2);
      }
    }
  }
};

// 16 rows of the state: (16, kColumns) sums, from a row and a column of the tile on. left: of
// tokens.
template <class C, int kColumns>
__device__ void add_sums(typename C::Element const* tile_k, typename C::Element const* tile_v,
                         float const* left, int row, int column, int tokens, bool decays,
                         float (&sums)[kColumns / 8][4]) {
  using Element = typename C::Element;
  int const own = threadIdx.x % 4 * 2;  // tokens of this lane, of every eight
  for (int t = 0; t < tokens; t += 16) {
    uint32_t k[4];
    read_a_deep<C::kK>(tile_k, t, row, k);
    if (decays) {
      float2 const near = *reinterpret_cast<float2 const*>(&left[t + own]);
      float2 const far = *reinterpret_cast<float2 const*>(&left[t + own + 8]);
      k[0] = decayed<Element>(k[0], near);
      k[1] = decayed<Element>(k[1], near);
      k[2] = decayed<Element>(k[2], far);
      k[3] = decayed<Element>(k[3], far);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      uint32_t v[4];
      read_b_deep<C::kV>(tile_v, t, column + n, v);
      multiply<Element>(k, v, sums[n / 8], sums[n / 8 + 1]);
    }
  }
}

// CTAs on an SM. Without the number ptxas takes three's registers for the least heads, and spills.
constexpr int kResidentStates = 2;

template <class C>
__global__ void __launch_bounds__(C::kThreads, kResidentStates)
    states_kernel(__grid_constant__ ForwardParams const p,
                  __grid_constant__ LinearTiles const grid) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<StatesStorage<C>*>(dynamic_smem());
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  auto const chunk = flash::linear::chunk_of(p.sequences, tile.slot);
  if (!chunk.exists()) {
    return;
  }
  auto const& tokens = chunk.tokens;
  int const heads = heads_in<C>(p, tile), warp = threadIdx.x / 32;
  for (int h = 0; h < heads; ++h) {
    int const head = tile.head + h;
    load_tile<C::kChunk, C::kK, C::kThreads>(
        rows_of<Element>(p.k, tokens, head / p.group, tile.k_begin), p.k.row_stride, smem.k[h],
        tokens.count, p.k_dim - tile.k_begin, p.aligned_k);
    load_tile<C::kChunk, C::kV, C::kThreads>(rows_of<Element>(p.v, tokens, head, tile.v_begin),
                                             p.v.row_stride, smem.v[h], tokens.count,
                                             p.v_dim - tile.v_begin, p.aligned_v);
  }
  cp_async_fence();
  bool const decays = p.gate.ptr, reverse = p.order == flash::linear::Order::Reverse;
  if (decays) {
    for (int h = warp; h < heads; h += C::kWarps) {
      flash::linear::cumulate<C::kChunk, Element>(p.gate, tokens, tile.head + h, smem.cumulated[h]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * C::kChunk; i += C::kThreads) {
      auto const& head = smem.cumulated[i / C::kChunk];
      Cumulated const token = head[i % C::kChunk];
      smem.left[i / C::kChunk][i % C::kChunk] =
          reverse ? decay_between({0.f, 0}, token) : decay_between(token, head[C::kChunk - 1]);
    }
  }
  if (tile.k_begin == 0 && tile.v_begin == 0 && threadIdx.x < heads) {
    int const h = threadIdx.x;
    p.workspace.decays[int64_t(tile.slot) * p.heads + tile.head + h] =
        decays ? decay_between({0.f, 0}, smem.cumulated[h][C::kChunk - 1]) : 1.f;
  }
  cp_async_wait<0>();
  __syncthreads();

  using W = StateOfWarp<C>;
  int const columns = p.v_columns();
  float const factor = reverse ? p.scale : 1.f;
  for (int item = warp; item < heads * W::kItems; item += C::kWarps) {
    W const own(item % W::kItems);
    int const h = item / W::kItems;
    float sums[W::kColumns / 8][4] = {};
    add_sums<C, W::kColumns>(smem.k[h], smem.v[h], smem.left[h], own.row, own.column, tokens.count,
                             decays, sums);
    float* const out =
        p.workspace.sums + (int64_t(tile.slot) * p.heads + tile.head + h) * p.state_size();
    own.for_pairs([&](int n, int half, int row, int column) {
      int const k = tile.k_begin + row, v = tile.v_begin + column;
      if (k < p.k_dim && v < columns) {
        *reinterpret_cast<float2*>(out + int64_t(k) * columns + v) = {
            factor * sums[n][2 * half], factor * sums[n][2 * half + 1]};
      }
    });
  }
}

constexpr int kScanThreads = 128;
constexpr int kScanned = 4;  // neighbouring columns of a thread

// states[c] = the state before chunk c, or, in reverse, its gradient after chunk c. A thread has a
// few numbers of a state.
template <class Stored>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(__grid_constant__ ForwardParams const p) {
  constexpr int kAhead = 8;  // chunks whose sums are on their way
  int const columns = p.v_columns();
  int64_t const size = p.heads * p.state_size() / kScanned;  // of one sequence, in threads
  int const blocks = static_cast<int>((size + kScanThreads - 1) / kScanThreads);
  int const sequence = blockIdx.x / blocks;
  int64_t const own = int64_t(blockIdx.x % blocks) * kScanThreads + threadIdx.x;
  if (own >= size) {
    return;
  }
  int const head = static_cast<int>(own * kScanned / p.state_size());
  int const in_state = static_cast<int>(own * kScanned - head * p.state_size());
  int const k = in_state / columns, v = in_state % columns;
  float state[kScanned];
#pragma unroll
  for (int e = 0; e < kScanned; ++e) {
    state[e] = p.initial.ptr && v + e < p.v_dim ? *p.initial.at(sequence, head, k, v + e) : 0.f;
  }
  int64_t const slot = flash::linear::first_slot(p.sequences, sequence);
  int const chunks = flash::linear::chunks_of(flash::linear::tokens_of(p.sequences, sequence).count,
                                              p.sequences.chunk);
  bool const reverse = p.order == flash::linear::Order::Reverse;
  int64_t const first = slot + (reverse ? chunks - 1 : 0), next = reverse ? -1 : 1;
  int64_t const size_of_slot = p.heads * p.state_size(), step = next * size_of_slot;
  float const* sums = p.workspace.sums + first * size_of_slot + own * kScanned;
  Stored* states = static_cast<Stored*>(p.workspace.states) + first * size_of_slot + own * kScanned;
  float const* decays = p.workspace.decays + first * p.heads + head;
  for (int begin = 0; begin < chunks; begin += kAhead) {
    float4 sum[kAhead];
    float decay[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      bool const exists = begin + i < chunks;
      sum[i] = exists ? __ldcg(reinterpret_cast<float4 const*>(sums + (begin + i) * step))
                      : float4{0.f, 0.f, 0.f, 0.f};
      decay[i] = exists ? __ldcg(decays + (begin + i) * next * p.heads) : 1.f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < chunks) {
        *reinterpret_cast<uint2*>(states + (begin + i) * step) = {pack<Stored>(state[0], state[1]),
                                                                  pack<Stored>(state[2], state[3])};
        state[0] = decay[i] * state[0] + sum[i].x;
        state[1] = decay[i] * state[1] + sum[i].y;
        state[2] = decay[i] * state[2] + sum[i].z;
        state[3] = decay[i] * state[3] + sum[i].w;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kScanned; ++e) {
    if (p.final.ptr && v + e < p.v_dim) {
      *p.final.at(sequence, head, k, v + e) = state[e];
    }
  }
}

}  // namespace flash::sm80::linear
