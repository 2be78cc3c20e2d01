// O of a segment with a vector of decays, chunk after chunk, from the state before the segment.
#pragma once

#include "sm80/linear/vector_own_factors.h"
#include "sm80/linear/vector_steps.h"

namespace flash::sm80::linear {

template <class C>
struct VectorStorage {
  typename StreamOf<C, /*kWithOutputs=*/true>::Storage stream;
  alignas(16) float4 parts[RowParts<C>::kSize];
  typename C::Steps::Storage steps;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    vector_outputs_kernel(__grid_constant__ VectorParams const vector,
                          __grid_constant__ LinearTiles const grid) {
  auto& smem = *reinterpret_cast<VectorStorage<C>*>(dynamic_smem());
  ForwardParams const& p = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> walk{p, tile, flash::linear::chunk_of(p.sequences, tile.slot)};
  walk.warp_k = C::of_warp(walk.warp_k);
  wait_for_launch_before();
  bool const first = walk.begins(), last = walk.ends();
  StreamOf<C, /*kWithOutputs=*/true> stream(walk, vector, smem.stream);
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
  typename C::Steps const steps(walk);
  WalkRows<C> out;
  RowStore<C> target(walk, walk.chunk_in_order(0), C::Steps::place(walk.lane()));
#pragma unroll 1
  for (int number = 0; number < stream.chunks; ++number) {
    auto const& chunk = stream.next();
    if (has_head(walk)) {
      steps.walk_along(chunk, state, out);
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
      steps.finish(chunk, target, out, smem.steps);
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
