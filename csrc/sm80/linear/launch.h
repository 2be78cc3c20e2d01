// Launches the kernels of one plan: states for any K, outputs where K has several tiles.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/outputs.h"
#include "sm80/linear/states.h"

namespace flash::sm80::linear {

inline int tiles_of(int columns, int tile) { return (columns + tile - 1) / tile; }

template <class Element, int kPlan>
struct OfPlan {
  static constexpr flash::linear::Plan plan = flash::linear::kPlans[kPlan];
  static constexpr int kWarps = 8;
  using C = Config<Element, plan.chunk, plan.k_tile, plan.v_tile, plan.heads, kWarps, plan.tiled>;
  static_assert(sizeof(StatesStorage<C>) <= flash::linear::kEveryGpusSmem);

  static TileGrid grid(ForwardParams const& p, int tiles_k) {
    return {tiles_k, tiles_of(p.v_dim, plan.v_tile), tiles_of(p.heads, plan.heads),
            p.sequences.slots};
  }
};

// The state before each chunk, or its gradient after each one, by p.order.
template <class Element, int kPlan>
void launch_states(ForwardParams const& p, LaunchContext const& launch) {
  using Of = OfPlan<Element, kPlan>;
  using C = typename Of::C;
  TileGrid const grid = Of::grid(p, tiles_of(p.k_dim, Of::plan.k_tile));
  launch_kernel<states_kernel<C>>(launch, {grid.count(), C::kThreads, sizeof(StatesStorage<C>)}, p,
                                  grid);
  int64_t const scans = (p.heads * p.state_size() / kScanned + kScanThreads - 1) / kScanThreads;
  launch_kernel<scan_kernel<StateElement>>(launch, {p.sequences.count * scans, kScanThreads, 0}, p);
}

template <class Element, int kPlan>
void launch_tiled(ForwardParams const& p, LaunchContext const& launch) {
  using Of = OfPlan<Element, kPlan>;
  using C = typename Of::C;
  constexpr flash::linear::Plan plan = Of::plan;
  static_assert(plan.tiled && sizeof(OutputsStorage<C>) <= flash::linear::kEveryGpusSmem);
  launch_states<Element, kPlan>(p, launch);
  using W = WeightsConfig<Element, plan.chunk>;
  int64_t const blocks = int64_t(p.sequences.slots) * p.heads * W::kPairs;
  launch_kernel<weights_kernel<W>>(launch, {blocks, W::kThreads, sizeof(WeightsStorage<W>)}, p);
  TileGrid const grid = Of::grid(p, 1);
  launch_kernel<outputs_kernel<C>>(launch, {grid.count(), C::kThreads, sizeof(OutputsStorage<C>)},
                                   p, grid);
}

}  // namespace flash::sm80::linear
