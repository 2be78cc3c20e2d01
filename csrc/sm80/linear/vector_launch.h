// Launches the kernels of linear attention with a vector of decays.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/vector_launches.h"
#include "sm80/linear/vector_outputs.h"
#include "sm80/linear/vector_segments.h"

namespace flash::sm80::linear {

template <class C>
LinearTiles vector_grid(ForwardParams const& p) {
  return {1, (p.v_dim + C::kV - 1) / C::kV, (p.heads + C::kHeads - 1) / C::kHeads,
          p.sequences.slots};
}

// All that needs no state, unless walks make it themselves.
template <class C>
void launch_vector_factors(VectorParams const& p, bool keys_only, LaunchContext const& launch) {
  if constexpr (!C::kOwnFactors) {
    using flash::linear::kEveryGpusSmem;
    static_assert(sizeof(VectorFactors<C>) == flash::linear::vector_factors_bytes(C::tiling));
    static_assert(sizeof(VectorFactorsStorage<C>) <= kEveryGpusSmem);
    static_assert(kFactorTokens % C::kChunk == 0);
    LinearTiles grid = vector_grid<C>(p.forward);
    grid.tiles_v = 1;
    flash::linear::Sequences const& s = p.forward.sequences;
    grid.slots = flash::linear::most_slots(s.cu, s.count, s.seqlen, kFactorTokens);
    launch_kernel<vector_factors_kernel<C>>(
        launch, {grid.count(), C::kThreads, sizeof(VectorFactorsStorage<C>)}, p, grid, keys_only);
  }
}

// What a segment adds to the state, and its outputs. A walk's first launch is not an early one:
// what it reads before it waits, the launch before may have written.
template <class C>
void launch_vector_sums(VectorParams const& p, LaunchContext const& launch) {
  constexpr int kSmem = sizeof(typename StreamOf<C, /*kWithOutputs=*/false>::Storage);
  static_assert(kSmem <= flash::linear::kEveryGpusSmem);
  launch_kernel<vector_sums_kernel<C>>(launch,
                                       {.blocks = vector_grid<C>(p.forward).count(),
                                        .threads = C::kThreads,
                                        .smem_bytes = kSmem,
                                        .early = !C::kOwnFactors},
                                       p, vector_grid<C>(p.forward));
}

template <class C>
void launch_vector_outputs(VectorParams const& p, LaunchContext const& launch) {
  constexpr int kSmem = sizeof(VectorStorage<C>);
  static_assert(kSmem <= flash::linear::kEveryGpusSmem);
  launch_kernel<vector_outputs_kernel<C>>(launch,
                                          {.blocks = vector_grid<C>(p.forward).count(),
                                           .threads = C::kThreads,
                                           .smem_bytes = kSmem,
                                           .early = !C::kOwnFactors || p.forward.workspace.sums},
                                          p, vector_grid<C>(p.forward));
}

// The state before each segment.
template <class C>
void launch_vector_scan(VectorParams const& p, LaunchContext const& launch) {
  ForwardParams const& f = p.forward;
  int64_t const of_head = C::tiling.state_size(f.v_dim) / 4;
  int64_t const blocks = (f.heads * of_head + kSegmentScanThreads - 1) / kSegmentScanThreads;
  launch_kernel<vector_scan_kernel<C>>(launch,
                                       {.blocks = f.sequences.count * blocks,
                                        .threads = kSegmentScanThreads,
                                        .smem_bytes = 0,
                                        .early = true},
                                       p, of_head);
}

// The launches of a walk, of tilings from kFirstTiling on. p.forward.sequences.chunk is the
// tiling's segment.
template <template <class, int, flash::linear::Order> class Config, class Element,
          flash::linear::Order kOrder, int kFirstTiling = 0>
struct VectorLaunchesOf {
  // Calls launch(config) with the config of p's tiling.
  template <int kTiling = kFirstTiling, class Launch>
  static void with_config(VectorParams const& p, Launch const& launch) {
    if constexpr (kTiling + 1 < flash::linear::kVectorTilingCount) {
      if (flash::linear::vector_number(p.forward.k_dim) != kTiling) {
        with_config<kTiling + 1>(p, launch);
        return;
      }
    }
    launch(Config<Element, kTiling, kOrder>{});
  }
  static void factors(VectorParams const& p, bool keys_only, LaunchContext const& launch) {
    with_config(p, [&]<class C>(C) { launch_vector_factors<C>(p, keys_only, launch); });
  }
  static void sums(VectorParams const& p, LaunchContext const& launch) {
    with_config(p, [&]<class C>(C) { launch_vector_sums<C>(p, launch); });
  }
  static void scan(VectorParams const& p, LaunchContext const& launch) {
    with_config(p, [&]<class C>(C) { launch_vector_scan<C>(p, launch); });
  }
  static void outputs(VectorParams const& p, LaunchContext const& launch) {
    with_config(p, [&]<class C>(C) { launch_vector_outputs<C>(p, launch); });
  }
  static constexpr flash::linear::VectorWalk walk() { return {sums, outputs}; }
  static constexpr flash::linear::VectorLaunches all() { return {factors, scan, walk()}; }
};

}  // namespace flash::sm80::linear
