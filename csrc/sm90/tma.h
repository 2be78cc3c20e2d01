// Loads tiles from global to shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/pipeline.h"
#include "sm90/tensor_map.h"

namespace flash::sm90 {

// Starts the load of a tile (kRows, kColumns), from `column` of the tensor on; its bytes count
// towards `full`. One thread calls it.
template <int kRows, int kColumns, int kRunColumns = kRun<kColumns>, class Element>
__device__ void load_tile(TensorMap const& tensor, TileCoord const& at, Element* smem,
                          Barrier& full, TMA::CacheHintSm90 hint, int column = 0) {
  auto const c = tensor.coordinates(at);
#pragma unroll
  for (int run = 0; run < kColumns; run += kRunColumns) {
    SM90_TMA_LOAD_5D::copy(&tensor.map, reinterpret_cast<uint64_t*>(&full),
                           static_cast<uint64_t>(hint), smem + run * kRows, column + run, c.c1,
                           c.c2, c.c3, c.c4);
  }
}

// A pair of CTAs loads a tile into both; CTA `rank` loads every other run. The buffer has to be
// free in both CTAs, and both count all of the tile's bytes.
template <int kRows, int kColumns, class Element>
__device__ void load_tile_for_pair(uint32_t rank, TensorMap const& tensor, TileCoord const& at,
                                   Element* smem, Barrier& full, TMA::CacheHintSm90 hint) {
  constexpr uint16_t kBoth = 3;
  constexpr int kRunColumns = kRun<kColumns>;
  auto const c = tensor.coordinates(at);
#pragma unroll 1
  for (int run = rank * kRunColumns; run < kColumns; run += 2 * kRunColumns) {
    SM90_TMA_LOAD_MULTICAST_5D::copy(&tensor.map, reinterpret_cast<uint64_t*>(&full), kBoth,
                                     static_cast<uint64_t>(hint), smem + run * kRows, run, c.c1,
                                     c.c2, c.c3, c.c4);
  }
}

}  // namespace flash::sm90
