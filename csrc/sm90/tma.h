// Tiles from global to shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/pipeline.h"
#include "sm90/tensor_map.h"

namespace flash::sm90 {

// Asks for a tile (kRows, kColumns); its bytes count towards `full`. By one thread.
template <int kRows, int kColumns, class Element>
__device__ void load_tile(TensorMap const& tensor, TileCoord const& at, Element* smem,
                          Barrier& full, TMA::CacheHintSm90 hint) {
  auto const c = tensor.coordinates(at);
#pragma unroll
  for (int run = 0; run < kColumns; run += kRun<kColumns>) {
    SM90_TMA_LOAD_5D::copy(&tensor.map, reinterpret_cast<uint64_t*>(&full),
                           static_cast<uint64_t>(hint), smem + run * kRows, run, c.c1, c.c2, c.c3,
                           c.c4);
  }
}

}  // namespace flash::sm90
