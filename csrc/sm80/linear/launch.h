// Launches the kernels of one plan.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/outputs.h"
#include "sm80/linear/states.h"

namespace flash::sm80::linear {

template <class Element, int kPlan>
void launch_forward(ForwardParams const& p, LaunchContext const& launch) {
  using flash::linear::Plan;
  constexpr Plan plan = flash::linear::kPlans[kPlan];
  constexpr int kWarps = 8;
  using C = Config<Element, plan.chunk, plan.k_tile, plan.v_tile, plan.heads, kWarps, plan.tiled>;
  static_assert(sizeof(OutputsStorage<C>) <= flash::linear::smem_bytes(plan));
  static_assert(sizeof(StatesStorage<C>) <= flash::linear::smem_bytes(plan));
  check(flash::linear::smem_bytes(plan) <= launch.device.smem_per_block, launch.name, " needs ",
        flash::linear::smem_bytes(plan), " bytes of shared memory for a CTA, the GPU has ",
        launch.device.smem_per_block);
  auto const tiles = [](int columns, int tile) { return (columns + tile - 1) / tile; };
  int const head_groups = tiles(p.heads, plan.heads), tiles_v = tiles(p.v_dim, plan.v_tile);

  TileGrid const states{tiles(p.k_dim, plan.k_tile), tiles_v, head_groups, p.sequences.slots};
  launch_kernel<states_kernel<C>>(launch, {states.count(), C::kThreads, sizeof(StatesStorage<C>)},
                                  p, states);
  if constexpr (plan.tiled) {
    using W = WeightsConfig<Element, plan.chunk>;
    int64_t const blocks = int64_t(p.sequences.slots) * p.heads * W::kPairs;
    launch_kernel<weights_kernel<W>>(launch, {blocks, W::kThreads, sizeof(WeightsStorage<W>)}, p);
  }
  int64_t const scans = (p.heads * p.state_size() / kScanned + kScanThreads - 1) / kScanThreads;
  launch_kernel<scan_kernel<StateElement>>(launch, {p.sequences.count * scans, kScanThreads, 0}, p);
  TileGrid const outputs{1, tiles_v, head_groups, p.sequences.slots};
  launch_kernel<outputs_kernel<C>>(
      launch, {outputs.count(), C::kThreads, sizeof(OutputsStorage<C>)}, p, outputs);
}

}  // namespace flash::sm80::linear
