// Launches the kernels that walk along segments.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/segments.h"
#include "sm80/linear/walk_outputs.h"

namespace flash::sm80::linear {

// p.sequences.chunk is the tiling's segment.
template <class Element, int kTiling>
void launch_walk(ForwardParams const& p, LaunchContext const& launch) {
  constexpr flash::linear::WalkTiling tiling = flash::linear::kWalkTilings[kTiling];
  using C = WalkConfig<Element, kTiling>;
  static_assert(sizeof(WalkStorage<C>) == tiling.smem_bytes());
  static_assert(sizeof(SumsStorage<C>) <= tiling.smem_bytes());
  LinearTiles const grid{1, (p.v_dim + C::kV - 1) / C::kV, (p.heads + C::kHeads - 1) / C::kHeads,
                         p.sequences.slots};
  if (p.workspace.sums) {
    launch_kernel<segment_sums_kernel<C>>(
        launch, {grid.count(), C::kThreads, sizeof(SumsStorage<C>)}, p, grid);
    int64_t const of_head = tiling.state_size(p.v_dim) / 4;
    int64_t const blocks = (p.heads * of_head + kSegmentScanThreads - 1) / kSegmentScanThreads;
    launch_kernel<segment_scan_kernel<C>>(launch,
                                          {.blocks = p.sequences.count * blocks,
                                           .threads = kSegmentScanThreads,
                                           .smem_bytes = 0,
                                           .early = true},
                                          p, of_head);
  }
  bool const early = p.workspace.sums;
  launch_kernel<walk_outputs_kernel<C>>(launch,
                                        {.blocks = grid.count(),
                                         .threads = C::kThreads,
                                         .smem_bytes = sizeof(WalkStorage<C>),
                                         .early = early},
                                        p, grid);
}

template <class Element, int kTiling = 0>
void launch_any_walk(ForwardParams const& p, LaunchContext const& launch) {
  if constexpr (kTiling + 1 < flash::linear::kWalkTilingCount) {
    if (flash::linear::walk_number(p.k_dim, launch.device.smem_per_block) != kTiling) {
      launch_any_walk<Element, kTiling + 1>(p, launch);
      return;
    }
  }
  launch_walk<Element, kTiling>(p, launch);
}

}  // namespace flash::sm80::linear
