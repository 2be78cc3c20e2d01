// The dQ semaphore. In a deterministic call KV blocks add to a row block's dQ in their order; with
// ordered dQ at least the first and the last one have their places. Two warps of the producer's
// warpgroup keep the semaphore, so that no consumer waits for L2: one waits until a KV block may
// add, iterations ahead of its use; the other waits until the additions are there, and releases the
// semaphore.
#pragma once

#include "sm90/backward/dq_action.h"

namespace flash::sm90::backward {

// Barriers between a CTA's two semaphore warps and the warps that add. Full: the KV block may add;
// empty: the semaphore was released.
struct DqSemaphoreStorage {
  static constexpr int kStages = 4;
  using Position = RingPosition<kStages>;

  Ring<kStages> ring;
  Ring<kStages> adding;  // empty: this iteration's additions were issued; never filled

  __device__ void init(int adding_warps) {
    ring.init(/*reading_warps=*/1);
    adding.init(adding_warps);
  }

  // All lanes of a warp that adds call these before and after its additions.
  __device__ void begin(uint32_t iteration) { ring.wait_full(Position(iteration)); }
  __device__ void end(uint32_t iteration) { adding.release(Position(iteration)); }

  __device__ void wait_for_end(uint32_t iteration) {
    Position const at(iteration);
    adding.empty(at.stage).wait(at.phase);
    compiler_fence();
  }
};

// Additions that other CTAs made before the number that is read here come before those that this
// thread, and warps that wait for it, make from now on.
__device__ inline int acquire_count(int const* count) {
#if defined(__CUDA_ARCH__)
  int number;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(number) : "l"(count) : "memory");
  return number;
#else
  return *count;
#endif
}

// Comes after everything that this thread, or the threads it has waited for, have seen: a release
// is cumulative.
__device__ inline void release_count(int* count) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(count), "r"(1) : "memory");
#else
  atomicAdd(count, 1);
#endif
}

// The warps of the producer's warpgroup that keep the dQ semaphore, after the first warp, which
// loads.
constexpr int kDqWaitingWarp = 1, kDqReleasingWarp = 2, kDqSemaphoreWarps = 2;

// All lanes of a warp call its functions together.
template <class Config>
struct DqSemaphoreWarp {
  using Block = KeyBlock<Config>;
  using Position = DqSemaphoreStorage::Position;

  BwdParams const& p;
  DqSemaphoreStorage& storage;
  int warp;                 // of the warpgroup
  uint32_t iterations = 0;  // row blocks so far

  // Serves all iterations of a KV block, if this is one of the two warps.
  __device__ void keep(Block const& block) {
    if (warp == kDqWaitingWarp) {
      wait(block);
    } else if (warp == kDqReleasingWarp) {
      pass_on(block);
    }
  }

 private:
  __device__ int* semaphore_of(Block const& block, int head, int m_block) const {
    return p.workspace.dq_semaphores + block.row_block(head, m_block);
  }

  // The number of additions that an iteration's own come after: those of all KV blocks before it,
  // or of the first one alone, for KV blocks between the first and the last of ordered dQ in a call
  // that is not deterministic.
  __device__ int additions_before(DqOrder const& order) const {
    bool const loose = Config::kOrderedDq && !p.ordered_dq.deterministic && !order.last;
    return Config::kAdders * (loose ? min(order.before, 1) : order.before);
  }

  // The KV blocks before this one belong to CTAs that run, so waiting for them always ends.
  __device__ void wait(Block const& block) {
    block.for_each_iteration([&](int head, int m_block) {
      storage.ring.wait_empty(Position(iterations));
      if (threadIdx.x % 32 == 0) {
        int const before = additions_before(dq_order_of(block, m_block));
        while (before > 0 && acquire_count(semaphore_of(block, head, m_block)) < before) {
          __nanosleep(20);
        }
        storage.ring.full(Position(iterations).stage).arrive();
      }
      ++iterations;
    });
  }

  // Releases the semaphore for all warps that added: their arrivals come before it.
  __device__ void pass_on(Block const& block) {
    block.for_each_iteration([&](int head, int m_block) {
      storage.wait_for_end(iterations);
      // With ordered dQ no CTA waits for the last KV block.
      bool const passes = !Config::kOrderedDq || !dq_order_of(block, m_block).last;
      if (threadIdx.x % 32 == 0 && passes) {
        release_count(semaphore_of(block, head, m_block));
      }
      storage.ring.release(Position(iterations++));
    });
  }
};

template <class Storage, class Config>
__device__ void run_dq_semaphore(Storage& smem, DqSemaphoreWarp<Config> keeper) {
  for (uint32_t number = 0;; ++number) {
    RingPosition<Config::kKeyStages> const at(number);
    smem.k_ring.wait_full(at);
    KeyBlock<Config> const& block = smem.key_block(number);
    if (!block.tile.valid) {
      return;
    }
    if constexpr (Config::kKeyStages > 1) {
      keeper.keep(block);
      smem.k_ring.release(at);
    } else {
      // Released at once, or the next keys would wait for the semaphore. The block's description
      // stays for two more blocks.
      smem.k_ring.release(at);
      keeper.keep(block);
    }
  }
}

}  // namespace flash::sm90::backward
