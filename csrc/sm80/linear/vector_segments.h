// What each segment adds to the state, and the state before each segment, with a vector of decays.
#pragma once

#include "sm80/linear/segments.h"
#include "sm80/linear/vector_own_factors.h"
#include "sm80/linear/vector_steps.h"

namespace flash::sm80::linear {

// As segment_sums_kernel, from the chunks' factors.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    vector_sums_kernel(__grid_constant__ VectorParams const vector,
                       __grid_constant__ LinearTiles const grid) {
  using Stream = StreamOf<C, /*kWithOutputs=*/false>;
  let_next_launch_start();
  ForwardParams const& p = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> walk{p, tile, flash::linear::chunk_of(p.sequences, tile.slot)};
  walk.warp_k = C::of_warp(walk.warp_k);
  wait_for_launch_before();
  if (!walk.segment.exists() || walk.ends()) {
    return;
  }
  Stream stream(walk, vector, *reinterpret_cast<typename Stream::Storage*>(dynamic_smem()));
  stream.begin();
  typename C::Steps const steps(walk);
  WalkState<C> state = {};
  // The decay of a row of a head's state over the segment.
  constexpr int kDecays = C::kHeads * C::kK;
  static_assert(kDecays <= C::kThreads);
  int const own_head = threadIdx.x / C::kK, own_decay = threadIdx.x % C::kK;
  bool const has_decay = threadIdx.x < kDecays && own_head < walk.heads();
  float total = 1.f;
#pragma unroll 1
  for (int number = 0; number < stream.chunks; ++number) {
    auto const& chunk = stream.next();
    if (has_decay) {
#pragma unroll
      for (int strip = 0; strip < C::kStrips; ++strip) {
        total *= chunk.keys(own_head).decays[strip][own_decay];
      }
    }
    if (has_head(walk)) {
      steps.sum(chunk, state);
    }
  }
  if (has_head(walk)) {
    walk.write_slot(grid, walk.next_slot(), state);
  }
  if (tile.v_begin == 0 && has_decay) {
    int64_t const of_head = int64_t(walk.next_slot()) * p.heads + tile.head + own_head;
    p.workspace.decays[of_head * C::kK + own_decay] = total;
  }
}

// As segment_scan_kernel.
template <class C>
__global__ void __launch_bounds__(kSegmentScanThreads)
    vector_scan_kernel(__grid_constant__ VectorParams const vector, int64_t const of_head) {
  constexpr int kAhead = 4;
  ForwardParams const& p = vector.forward;
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
    if constexpr (C::kReverse) {
      float const factor = 1.f / vector.scale.unit;
      state = {state.x * factor, state.y * factor, state.z * factor, state.w * factor};
    }
  }
  wait_for_launch_before();
  if (!works) {
    return;
  }
  int const in_tile = static_cast<int>(own % of_head % (StatePlace<C>::kSquares * 32));
  int const k = StatePlace<C>::of(in_tile / 32, in_tile % 32).k;
  // The slot where the walk begins.
  int64_t const slot =
      flash::linear::first_slot(p.sequences, sequence) + (C::kReverse ? segments - 1 : 0);
  float4* const states = reinterpret_cast<float4*>(p.workspace.sums) + slot * size + own;
  float const* const decays = p.workspace.decays + (slot * p.heads + head) * C::kK + decay_place(k);
  constexpr int kNext = C::kReverse ? -1 : 1;
  int64_t const of_decays = int64_t(kNext) * p.heads * C::kK;
  for (int begin = 1; begin < segments; begin += kAhead) {
    float4 sum[kAhead];
    float2 decay[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      bool const exists = begin + i < segments;
      auto const* at = reinterpret_cast<float2 const*>(decays + (begin + i) * of_decays);
      sum[i] = exists ? __ldcg(states + (begin + i) * kNext * size) : float4{0.f, 0.f, 0.f, 0.f};
      decay[i] = exists ? __ldcg(at) : float2{1.f, 1.f};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < segments) {
        state = {decay[i].x * state.x + sum[i].x, decay[i].y * state.y + sum[i].y,
                 decay[i].x * state.z + sum[i].z, decay[i].y * state.w + sum[i].w};
        states[(begin + i) * kNext * size] = state;
      }
    }
  }
}

}  // namespace flash::sm80::linear
