// Launches the kernels of linear attention with a vector of decays.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/vector_outputs.h"
#include "sm80/linear/vector_segments.h"

namespace flash::sm80::linear {

// p.forward.sequences.chunk is the plan's segment.
template <class Element, int kPlan>
void launch_vector(VectorParams const& p, LaunchContext const& launch) {
  using C = VectorConfig<Element, kPlan>;
  constexpr int kBytes = flash::linear::vector_smem_bytes(C::plan);
  static_assert(sizeof(VectorStorage<C>) == kBytes - (2 - C::kKeyParts) * C::kHeads * C::kChunk *
                                                         C::kK * int(sizeof(WideElement)));
  static_assert(sizeof(VectorSumsStorage<C>) <= kBytes);
  ForwardParams const& f = p.forward;
  TileGrid const grid{1, (f.v_dim + C::kV - 1) / C::kV, (f.heads + C::kHeads - 1) / C::kHeads,
                      f.sequences.slots};
  bool const early = f.workspace.sums;
  if (f.workspace.sums) {
    launch_kernel<vector_sums_kernel<C>>(
        launch, {grid.count(), C::kThreads, sizeof(VectorSumsStorage<C>)}, p, grid);
    int64_t const of_head = C::plan.state_size(f.v_dim) / 4;
    int64_t const blocks = (f.heads * of_head + kSegmentScanThreads - 1) / kSegmentScanThreads;
    launch_kernel<vector_scan_kernel<C>>(launch,
                                         {.blocks = f.sequences.count * blocks,
                                          .threads = kSegmentScanThreads,
                                          .smem_bytes = 0,
                                          .early = true},
                                         f, of_head);
  }
  launch_kernel<vector_outputs_kernel<C>>(launch,
                                          {.blocks = grid.count(),
                                           .threads = C::kThreads,
                                           .smem_bytes = sizeof(VectorStorage<C>),
                                           .early = early},
                                          p, grid);
}

template <class Element, int kPlan = 0>
void launch_any_vector(VectorParams const& p, LaunchContext const& launch) {
  if constexpr (kPlan + 1 < flash::linear::kVectorPlanCount) {
    if (flash::linear::vector_number(p.forward.k_dim, launch.device.smem_per_block) != kPlan) {
      launch_any_vector<Element, kPlan + 1>(p, launch);
      return;
    }
  }
  launch_vector<Element, kPlan>(p, launch);
}

}  // namespace flash::sm80::linear
