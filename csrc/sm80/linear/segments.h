// What each segment adds to the state, and the state before each segment.
#pragma once

#include "sm80/linear/walk.h"

namespace flash::sm80::linear {

template <class C>
struct SumsStorage {
  static constexpr int kStages = 2;
  using Element = typename C::Element;
  alignas(16) Element k[kStages][C::kHeads][C::kChunk * C::kK];
  alignas(16) Element v[kStages][C::kHeads][C::kChunk * C::kV];
  ChunkDecays<C::kChunk> decays[kStages][C::kHeads];
};

// Leaves what segments add in the slots after their own, and what they leave of the state before
// them. The last one of a sequence adds to no other.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    segment_sums_kernel(__grid_constant__ ForwardParams const p,
                        __grid_constant__ LinearTiles const grid) {
  auto& smem = *reinterpret_cast<SumsStorage<C>*>(dynamic_smem());
  let_next_launch_start();
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{p, tile, flash::linear::chunk_of(p.sequences, tile.slot)};
  if (!walk.segment.exists() || walk.segment.last) {
    return;
  }
  int const chunks = walk.chunks();
  auto keys = tiles_of_k(walk, p.k);
  auto values = tiles_of_v(walk);
  auto const load = [&](int number) {
    if (number < chunks) {
      int const rows = walk.chunk(number).count;
      keys.load(rows, smem.k[number % 2]);
      values.load(rows, smem.v[number % 2]);
    }
    cp_async_fence();
  };
  load(0);
  if (walk.has_decays()) {
    smem.decays[0][walk.h].set(walk.logs(0));
  }
  WalkState<C> state = {};
  float total = 1.f;
#pragma unroll 1
  for (int number = 0; number < chunks; ++number) {
    cp_async_wait<0>();
    __syncthreads();
    load(number + 1);
    bool const sets = walk.has_decays() && number + 1 < chunks;
    auto const logs = sets ? walk.logs(number + 1) : flash::linear::LogDecays<C::kChunk>{};
    if (walk.exists()) {
      auto const& decays = smem.decays[number % 2][walk.h];
      auto const* k = smem.k[number % 2][walk.h];
      auto const* v = smem.v[number % 2][walk.h];
      scale_state<C>(state, decays.total());
      total *= decays.total();
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        uint32_t operands[C::kBlocks][4];
        read_values<C>(v, strip, walk.column, operands);
        add_keys<C>(k, strip, walk.warp_k * C::kRows, operands, decays.left, state);
      }
    }
    if (sets) {
      smem.decays[(number + 1) % 2][walk.h].set(logs);
    }
  }
  if (!walk.exists()) {
    return;
  }
  walk.write_slot(grid, tile.slot + 1, state);
  if (tile.v_begin == 0 && walk.has_decays() && walk.lane() == 0) {
    p.workspace.decays[int64_t(tile.slot + 1) * p.heads + walk.head()] = total;
  }
}

constexpr int kSegmentScanThreads = 128;

// Four numbers of a head's initial state, as an accumulator has them.
template <class C>
__device__ float4 initial_of(ForwardParams const& p, int sequence, int head, int64_t in_head) {
  constexpr int kOfTile = StatePlace<C>::kSquares * 32;
  if (!p.initial.ptr) {
    return {0.f, 0.f, 0.f, 0.f};
  }
  int const tile = static_cast<int>(in_head / kOfTile), in_tile = in_head % kOfTile;
  auto const place = StatePlace<C>::of(in_tile / 32, in_tile % 32);
  auto const read = [&](int k, int v) {
    bool const exists = k < p.k_dim && v < p.v_dim;
    return exists ? *p.initial.at(sequence, head, k, v) : 0.f;
  };
  int const k = place.k, v = tile * C::kV + place.v;
  return {read(k, v), read(k + 1, v), read(k, v + 8), read(k + 1, v + 8)};
}

// Sums become the state before each segment but the first. A thread has four numbers of a state.
template <class C>
__global__ void __launch_bounds__(kSegmentScanThreads)
    segment_scan_kernel(__grid_constant__ ForwardParams const p, int64_t const of_head) {
  constexpr int kAhead = 4;
  let_next_launch_start();
  int64_t const size = p.heads * of_head;
  int const blocks = static_cast<int>((size + kSegmentScanThreads - 1) / kSegmentScanThreads);
  int const sequence = blockIdx.x / blocks;
  int64_t const own = int64_t(blockIdx.x % blocks) * kSegmentScanThreads + threadIdx.x;
  int const segments = flash::linear::chunks_of(
      flash::linear::tokens_of(p.sequences, sequence).count, p.sequences.chunk);
  bool const works = own < size && segments > 1;
  int const head = static_cast<int>(own / of_head);
  float4 state{};
  if (works) {
    state = initial_of<C>(p, sequence, head, own % of_head);
  }
  wait_for_launch_before();
  if (!works) {
    return;
  }
  int64_t const slot = flash::linear::first_slot(p.sequences, sequence);
  float4* const states = reinterpret_cast<float4*>(p.workspace.sums) + slot * size + own;
  float const* const decays = p.workspace.decays + slot * p.heads + head;
  for (int begin = 1; begin < segments; begin += kAhead) {
    float4 sum[kAhead];
    float decay[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      bool const exists = begin + i < segments;
      sum[i] = exists ? __ldcg(states + (begin + i) * size) : float4{0.f, 0.f, 0.f, 0.f};
      decay[i] = exists ? __ldcg(decays + (begin + i) * p.heads) : 1.f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < segments) {
        state = {decay[i] * state.x + sum[i].x, decay[i] * state.y + sum[i].y,
                 decay[i] * state.z + sum[i].z, decay[i] * state.w + sum[i].w};
        states[(begin + i) * size] = state;
      }
    }
  }
}

}  // namespace flash::sm80::linear
