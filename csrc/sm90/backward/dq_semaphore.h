// In a deterministic call key blocks take turns at adding to a row block's dQ, in their order; in a
// relay the first and the last one do. Two warps that do not compute see to it, so that nobody who
// does waits for L2: one looks whether a turn has come, iterations ahead of its use; one waits until
// what was added is there, and passes the turn on.
#pragma once

#include "sm90/backward/dq_action.h"
#include "sm90/pipeline.h"

namespace flash::sm90::backward {

// Between those two warps of a thread block and those that add. Filled: the turn has come; emptied:
// it was passed on.
struct DqSemaphoreStorage {
  static constexpr int kStages = 4;
  using Position = RingPosition<kStages>;

  Ring<kStages> ring;
  Ring<kStages> adding;  // empty: this iteration's additions were issued; never filled

  __device__ void init(int adding_warps) {
    ring.init(/*reading_warps=*/1);
    adding.init(adding_warps);
  }

  // By all lanes of a warp that adds, before and after.
  __device__ void begin(uint32_t iteration) { ring.wait_full(Position(iteration)); }
  __device__ void end(uint32_t iteration) { adding.release(Position(iteration)); }

  __device__ void wait_for_end(uint32_t iteration) {
    Position const at(iteration);
    adding.empty(at.stage).wait(at.phase);
    compiler_fence();
  }
};

// What others added before a number that is read here, is added before what the thread, and who
// waits for it, adds from now on.
__device__ inline int acquire_count(int const* turn) {
#if defined(__CUDA_ARCH__)
  int number;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(number) : "l"(turn) : "memory");
  return number;
#else
  return *turn;
#endif
}

// Behind all that was seen, by this thread or by those it has waited for: a release is cumulative.
__device__ inline void release_count(int* turn) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(turn), "r"(1) : "memory");
#else
  atomicAdd(turn, 1);
#endif
}

// The warps of the loading warpgroup that keep turns: after the first, which loads.
constexpr int kDqWaitingWarp = 1, kDqReleasingWarp = 2, kDqSemaphoreWarps = 2;

// All lanes of a warp call its functions together.
template <class Config>
struct DqSemaphoreWarp {
  using Block = KeyBlock<Config>;
  using Position = DqSemaphoreStorage::Position;

  BwdParams const& p;
  DqSemaphoreStorage& storage;
  int warp;             // of the warpgroup
  uint32_t iterations = 0;  // row blocks so far

  // Of all iterations of a key block, if this warp keeps turns.
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

  // Additions that those of a iteration come behind: those of all key blocks before it, or, between the
  // first of a relay and the last one, of the first alone.
  __device__ int additions_before(DqOrder const& turn) const {
    bool const loose = Config::kOrderedDq && !p.ordered_dq.deterministic && !turn.last;
    return Config::kAdders * (loose ? min(turn.before, 1) : turn.before);
  }

  // The key blocks before this one belong to thread blocks that run, so waiting for them always
  // ends.
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

  // It speaks for all who added: their arrivals come before it.
  __device__ void pass_on(Block const& block) {
    block.for_each_iteration([&](int head, int m_block) {
      storage.wait_for_end(iterations);
      // Nobody waits for the last of a relay.
      bool const passes = !Config::kOrderedDq || !dq_order_of(block, m_block).last;
      if (threadIdx.x % 32 == 0 && passes) {
        release_count(semaphore_of(block, head, m_block));
      }
      storage.ring.release(Position(iterations++));
    });
  }
};

// A warp that keeps turns: of all key blocks of a thread block.
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
      // At once, or the next keys would wait for turns to be passed on. What describes the block
      // stays for two more.
      smem.k_ring.release(at);
      keeper.keep(block);
    }
  }
}

}  // namespace flash::sm90::backward
