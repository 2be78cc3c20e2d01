// Rings of buffers in shared memory that one warp fills by TMA and warpgroups empty.
#pragma once

#include <cutlass/arch/barrier.h>

#include "core/compiler_fence.h"
#include "sm90/tensor_core.h"

namespace flash::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;
static_assert(sizeof(Barrier) == sizeof(uint64_t));

// Where the i-th tile of a stream goes in a ring of kStages buffers. A wait for `phase` returns
// when the buffer was filled for this tile; one for `phase ^ 1`, when it was emptied of the tile
// before, or at once if there was none.
template <int kStages>
struct RingPosition {
  int stage;
  uint32_t phase;

  __device__ explicit RingPosition(uint32_t i) : stage(i % kStages), phase(i / kStages % 2) {}

  // To the next tile's: cheaper than a division where that is not by a power of two.
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // Its place in twice as many buffers. Who fills a buffer of the ring knows that its readers are
  // through with all that they did before they emptied it, but not with the tile that was in it.
  __device__ int in_two_rounds() const { return phase * kStages + stage; }
};

// Full: one arrival, by the loader, which also says how many bytes TMA brings; or, of what the
// computing warps write, one by each of them. Empty: one arrival by each warp that reads, because a
// wait for wgmma speaks for one warp only.
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
  // Asks first: who has several to wait for need not wait for one after the other.
  __device__ bool is_full(RingPosition<kStages> at) { return full(at.stage).try_wait(at.phase); }
  // By all lanes of the loading warp, which go on together: a lane that is late would find the
  // phase after the one it waits for, if another had the buffer filled meanwhile.
  __device__ void wait_empty(RingPosition<kStages> at) {
    empty(at.stage).wait(at.phase ^ 1);
    __syncwarp();
    compiler_fence();
  }

  // By all lanes of a writing warp, whose stores products are going to read.
  __device__ void announce(RingPosition<kStages> at) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      full(at.stage).arrive();
    }
  }

  // By all lanes of a reading warp.
  __device__ void release(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      empty(stage).arrive();
    }
  }
  __device__ void release(RingPosition<kStages> at) { release(at.stage); }

  // The same in both thread blocks of a pair.
  __device__ void release_in_pair(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 < 2) {
      empty(stage).arrive(threadIdx.x % 32);
    }
  }
};

}  // namespace flash::sm90
