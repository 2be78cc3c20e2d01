// Launches the kernels of linear attention with a vector of decays.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/vector_outputs.h"
#include "sm80/linear/vector_segments.h"

namespace flash::sm80::linear {

template <class C>
LinearTiles vector_grid(ForwardParams const& p) {
  return {1, (p.v_dim + C::kV - 1) / C::kV, (p.heads + C::kHeads - 1) / C::kHeads,
          p.sequences.slots};
}

// All that needs no state.
template <class C>
void launch_vector_factors(VectorParams const& p, bool keys_only, LaunchContext const& launch) {
  using flash::linear::kEveryGpusSmem;
  static_assert(sizeof(VectorFactors<C>) == flash::linear::vector_factors_bytes(C::tiling));
  static_assert(sizeof(VectorFactorsStorage<C>) <= kEveryGpusSmem);
  LinearTiles grid = vector_grid<C>(p.forward);
  grid.tiles_v = 1;
  flash::linear::Sequences const& s = p.forward.sequences;
  grid.slots = flash::linear::most_slots(s.cu, s.count, s.seqlen, C::kChunk);
  launch_kernel<vector_factors_kernel<C>>(
      launch, {grid.count(), C::kThreads, sizeof(VectorFactorsStorage<C>)}, p, grid, keys_only);
}

// The state before each segment, if a sequence may have several.
template <class C>
void launch_vector_segments(VectorParams const& p, LaunchContext const& launch) {
  ForwardParams const& f = p.forward;
  if (!f.workspace.sums) {
    return;
  }
  LinearTiles const grid = vector_grid<C>(f);
  launch_kernel<vector_sums_kernel<C>>(
      launch,
      {.blocks = grid.count(),
       .threads = C::kThreads,
       .smem_bytes = C::kStages * sizeof(VectorStage<C, VectorKeys<C>>),
       .early = true},
      p, grid);
  int64_t const of_head = C::tiling.state_size(f.v_dim) / 4;
  int64_t const blocks = (f.heads * of_head + kSegmentScanThreads - 1) / kSegmentScanThreads;
  launch_kernel<vector_scan_kernel<C>>(launch,
                                       {.blocks = f.sequences.count * blocks,
                                        .threads = kSegmentScanThreads,
                                        .smem_bytes = 0,
                                        .early = true},
                                       p, of_head);
}

// The states alone.
struct LaunchVectorStates {
  template <class C>
  static void run(VectorParams const& p, LaunchContext const& launch) {
    if (p.forward.workspace.sums) {
      launch_vector_factors<C>(p, /*keys_only=*/true, launch);
      launch_vector_segments<C>(p, launch);
    }
  }
};

// And the outputs.
struct LaunchVector {
  template <class C>
  static void run(VectorParams const& p, LaunchContext const& launch) {
    constexpr int kSmem = sizeof(VectorStorage<C>);
    static_assert(kSmem <= flash::linear::kEveryGpusSmem);
    launch_vector_factors<C>(p, /*keys_only=*/false, launch);
    launch_vector_segments<C>(p, launch);
    LinearTiles const grid = vector_grid<C>(p.forward);
    launch_kernel<vector_outputs_kernel<C>>(
        launch,
        {.blocks = grid.count(), .threads = C::kThreads, .smem_bytes = kSmem, .early = true}, p,
        grid);
  }
};

// p.forward.sequences.chunk is the tiling's segment.
template <class Launch, class Element, flash::linear::Order kOrder, int kTiling = 0>
void launch_any_vector(VectorParams const& p, LaunchContext const& launch) {
  if constexpr (kTiling + 1 < flash::linear::kVectorTilingCount) {
    if (flash::linear::vector_number(p.forward.k_dim) != kTiling) {
      launch_any_vector<Launch, Element, kOrder, kTiling + 1>(p, launch);
      return;
    }
  }
  Launch::template run<VectorConfig<Element, kTiling, kOrder>>(p, launch);
}

}  // namespace flash::sm80::linear
