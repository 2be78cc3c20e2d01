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

// The state before each segment, if a sequence may have several.
struct LaunchVectorStates {
  template <class C>
  static void run(VectorParams const& p, LaunchContext const& launch) {
    ForwardParams const& f = p.forward;
    if (!f.workspace.sums) {
      return;
    }
    static_assert(sizeof(VectorSumsStorage<C>) <= flash::linear::vector_smem_bytes(C::tiling));
    LinearTiles const grid = vector_grid<C>(f);
    launch_kernel<vector_sums_kernel<C>>(
        launch, {grid.count(), C::kThreads, sizeof(VectorSumsStorage<C>)}, p, grid);
    int64_t const of_head = C::tiling.state_size(f.v_dim) / 4;
    int64_t const blocks = (f.heads * of_head + kSegmentScanThreads - 1) / kSegmentScanThreads;
    launch_kernel<vector_scan_kernel<C>>(launch,
                                         {.blocks = f.sequences.count * blocks,
                                          .threads = kSegmentScanThreads,
                                          .smem_bytes = 0,
                                          .early = true},
                                         p, of_head);
  }
};

// And the outputs.
struct LaunchVector {
  template <class C>
  static void run(VectorParams const& p, LaunchContext const& launch) {
    static_assert(sizeof(VectorStorage<C>) == flash::linear::vector_smem_bytes(C::tiling) -
                                                  (2 - C::kKeyParts) * C::kHeads * C::kChunk *
                                                      C::kK * int(sizeof(WideElement)));
    LaunchVectorStates::run<C>(p, launch);
    LinearTiles const grid = vector_grid<C>(p.forward);
    launch_kernel<vector_outputs_kernel<C>>(launch,
                                            {.blocks = grid.count(),
                                             .threads = C::kThreads,
                                             .smem_bytes = sizeof(VectorStorage<C>),
                                             .early = p.forward.workspace.sums != nullptr},
                                            p, grid);
  }
};

// p.forward.sequences.chunk is the tiling's segment.
template <class Launch, class Element, flash::linear::Order kOrder, int kTiling = 0>
void launch_any_vector(VectorParams const& p, LaunchContext const& launch) {
  if constexpr (kTiling + 1 < flash::linear::kVectorTilingCount) {
    if (flash::linear::vector_number(p.forward.k_dim, launch.device.smem_per_block) != kTiling) {
      launch_any_vector<Launch, Element, kOrder, kTiling + 1>(p, launch);
      return;
    }
  }
  Launch::template run<VectorConfig<Element, kTiling, kOrder>>(p, launch);
}

}  // namespace flash::sm80::linear
