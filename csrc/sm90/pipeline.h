// Rings of buffers in shared memory that one warp fills by TMA and warpgroups empty, and the loads
// that fill them.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/copy_async.h"
#include "sm90/tensor_core.h"
#include "sm90/tensor_map.h"

namespace flash::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;
static_assert(sizeof(Barrier) == sizeof(uint64_t));

// Where the i-th tile of a stream goes in a ring of kStages buffers. A wait for `phase` returns
// when the buffer has been filled with this tile; a wait for `phase ^ 1` returns when the tile
// before has left it, or at once if there was none.
template <int kStages>
struct RingPosition {
  int stage;
  uint32_t phase;

  __device__ explicit RingPosition(uint32_t i) : stage(i % kStages), phase(i / kStages % 2) {}

  // Moves to the next tile's position: cheaper than a division where kStages is no power of two.
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // Index among twice as many entries, for data of a tile that consumers still read after they have
  // emptied its buffer. When the producer fills the buffer again, consumers have finished with
  // earlier tiles, but perhaps not with the tile that was in it.
  __device__ int in_two_rounds() const { return phase * kStages + stage; }
};

// full: one arrival by the producer warp, which also says how many bytes TMA brings; or, in buffers
// that consumers write, one arrival by each consumer warp. empty: one arrival by each warp that
// reads, because a wait for wgmma covers one warp only.
template <int kStages>
struct Ring {
  alignas(8) uint64_t full_[kStages];
  alignas(8) uint64_t empty_[kStages];

  __device__ Barrier& full(int stage) { return reinterpret_cast<Barrier&>(full_[stage]); }
  __device__ Barrier& empty(int stage) { return reinterpret_cast<Barrier&>(empty_[stage]); }

  __device__ void init(int reading_warps, int writing_warps = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).init(writing_warps);
      empty(stage).init(reading_warps);
    }
  }

  __device__ void wait_full(RingPosition<kStages> at) {
    full(at.stage).wait(at.phase);
    compiler_fence();
  }
  // Asks without waiting, so that a warp that needs several buffers need not wait for them one by
  // one.
  __device__ bool is_full(RingPosition<kStages> at) { return full(at.stage).try_wait(at.phase); }
  // All lanes of the producer warp call it and go on together: a late lane would find the phase
  // after the one it waits for, if another lane had the buffer filled in the meantime.
  __device__ void wait_empty(RingPosition<kStages> at) {
    empty(at.stage).wait(at.phase ^ 1);
    __syncwarp();
    compiler_fence();
  }

  // All lanes of a writing warp call it; products are going to read the warp's stores.
  __device__ void announce(RingPosition<kStages> at) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      full(at.stage).arrive();
    }
  }

  // All lanes of a reading warp call it.
  __device__ void release(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      empty(stage).arrive();
    }
  }
  __device__ void release(RingPosition<kStages> at) { release(at.stage); }

  // The same in CTA `rank` of the cluster.
  __device__ void release_at(uint32_t rank, int stage = 0) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      empty(stage).arrive(rank);
    }
  }

  // The same in both CTAs of a pair, which are CTAs `first` and first + 1 of the cluster.
  __device__ void release_in_pair(int stage, uint32_t first = 0) {
    __syncwarp();
    if (threadIdx.x % 32 < 2) {
      empty(stage).arrive(first + threadIdx.x % 32);
    }
  }
};

// Starts the load of a tile (kRows, kColumns), from `column` of the tensor on; its bytes count
// towards `full`. Runs from column `end` of the tile on are left out. One thread calls it.
template <int kRows, int kColumns, int kRunColumns = kRun<kColumns>, class Element>
__device__ void load_tile(TensorMap const& tensor, TileCoord const& at, Element* smem,
                          Barrier& full, TMA::CacheHintSm90 hint, int column = 0,
                          int end = kColumns) {
  auto const c = tensor.coordinates(at);
#pragma unroll
  for (int run = 0; run < kColumns; run += kRunColumns) {
    if (run >= end) {
      break;
    }
    SM90_TMA_LOAD_5D::copy(&tensor.map, reinterpret_cast<uint64_t*>(&full),
                           static_cast<uint64_t>(hint), smem + run * kRows, column + run, c.c1,
                           c.c2, c.c3, c.c4);
  }
}

// A CTA of a pair, which are CTAs `first` and first + 1 of their cluster.
struct OneOfPair {
  uint32_t index;
  uint32_t first = 0;
};

// A pair of CTAs loads a tile into both; each loads every other run. The buffer has to be free in
// both CTAs, and both count all of the tile's bytes.
template <int kRows, int kColumns, class Element>
__device__ void load_tile_for_pair(OneOfPair cta, TensorMap const& tensor, TileCoord const& at,
                                   Element* smem, Barrier& full, TMA::CacheHintSm90 hint,
                                   int column = 0, int end = kColumns) {
  constexpr uint32_t kBoth = 3;
  constexpr int kRunColumns = kRun<kColumns>;
  auto const c = tensor.coordinates(at);
#pragma unroll 1
  for (int run = cta.index * kRunColumns; run < end; run += 2 * kRunColumns) {
    SM90_TMA_LOAD_MULTICAST_5D::copy(
        &tensor.map, reinterpret_cast<uint64_t*>(&full), static_cast<uint16_t>(kBoth << cta.first),
        static_cast<uint64_t>(hint), smem + run * kRows, column + run, c.c1, c.c2, c.c3, c.c4);
  }
}

}  // namespace flash::sm90
