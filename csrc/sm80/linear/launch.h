// Launches the kernels of one tiling: states for any K, outputs where K has several tiles.
#pragma once

#include "launch/launch_kernel.h"
#include "linear/launch.h"
#include "sm80/linear/outputs.h"
#include "sm80/linear/states.h"

namespace flash::sm80::linear {

inline int tiles_of(int columns, int tile) { return (columns + tile - 1) / tile; }

template <class Element, int kTiling>
struct OfTiling {
  static constexpr flash::linear::Tiling tiling = flash::linear::kTilings[kTiling];
  static constexpr int kWarps = 8;
  using C = Config<Element, tiling.chunk, tiling.k_tile, tiling.v_tile, tiling.heads, kWarps,
                   tiling.tiled>;
  static_assert(sizeof(StatesStorage<C>) <= flash::linear::kEveryGpusSmem);

  static LinearTiles grid(ForwardParams const& p, int tiles_k) {
    return {tiles_k, tiles_of(p.v_dim, tiling.v_tile), tiles_of(p.heads, tiling.heads),
            p.sequences.slots};
  }
};

// The state before each chunk, or its gradient after each one, by p.order.
template <class Element, int kTiling>
void launch_states(ForwardParams const& p, LaunchContext const& launch) {
  using Of = OfTiling<Element, kTiling>;
  using C = typename Of::C;
  LinearTiles const grid = Of::grid(p, tiles_of(p.k_dim, Of::tiling.k_tile));
  launch_kernel<states_kernel<C>>(launch, {grid.count(), C::kThreads, sizeof(StatesStorage<C>)}, p,
                                  grid);
  int64_t const scans = (p.heads * p.state_size() / kScanned + kScanThreads - 1) / kScanThreads;
  launch_kernel<scan_kernel<StateElement>>(launch, {p.sequences.count * scans, kScanThreads, 0}, p);
}

template <class Element, int kTiling>
void launch_tiled(ForwardParams const& p, LaunchContext const& launch) {
  using Of = OfTiling<Element, kTiling>;
  using C = typename Of::C;
  constexpr flash::linear::Tiling tiling = Of::tiling;
  static_assert(tiling.tiled && sizeof(OutputsStorage<C>) <= flash::linear::kEveryGpusSmem);
  launch_states<Element, kTiling>(p, launch);
  using W = WeightsConfig<Element, tiling.chunk>;
  int64_t const blocks = int64_t(p.sequences.slots) * p.heads * W::kPairs;
  launch_kernel<weights_kernel<W>>(launch, {blocks, W::kThreads, sizeof(WeightsStorage<W>)}, p);
  LinearTiles const grid = Of::grid(p, 1);
  launch_kernel<outputs_kernel<C>>(launch, {grid.count(), C::kThreads, sizeof(OutputsStorage<C>)},
                                   p, grid);
}

}  // namespace flash::sm80::linear
