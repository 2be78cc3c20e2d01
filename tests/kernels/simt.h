// A thread block on the host: its threads are fibers that take turns and switch at barriers only.
// Enough of CUDA's vocabulary to compile the kernels of csrc/ unchanged with a host compiler.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#undef __device__
#undef __global__
#undef __shared__
#undef __align__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

namespace simt {

constexpr int kWarp = 32;

// All of `count` threads arrive before any goes on.
struct Barrier {
  int count = 0;
  int arrived = 0;
  int generation = 0;
};

// A memory read that a thread has asked for and that has not arrived.
struct PendingCopy {
  void* target;
  void const* source;  // null: zeros
  int bytes;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  std::vector<PendingCopy> copies;
};

// What the lanes of a warp show each other in collective instructions.
struct Warp {
  Barrier barrier;
  uint64_t words[kWarp][8];
};

struct Block {
  explicit Block(int threads) : warps(threads / kWarp), threads(threads) {
    barrier.count = threads;
    for (Warp& warp : warps) {
      warp.barrier.count = kWarp;
    }
  }

  // Runs `body` as every thread of the block, to its end.
  void run(std::function<void()> const& body);

  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  ucontext_t scheduler;
  int current = 0;
  bool progress = false;
};

inline Block* block = nullptr;

inline int lane() { return block->current % kWarp; }
inline Warp& warp() { return block->warps[block->current / kWarp]; }
inline Thread& thread() { return block->threads[block->current]; }

inline void wait(Barrier& barrier) {
  block->progress = true;
  int const generation = barrier.generation;
  if (++barrier.arrived == barrier.count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) {
    swapcontext(&thread().context, &block->scheduler);
  }
}

// Every lane shows `mine` and then sees what `read` makes of all lanes' words.
template <int kWords, class Read>
void exchange(uint64_t const (&mine)[kWords], Read read) {
  std::memcpy(warp().words[lane()], mine, sizeof(mine));
  wait(warp().barrier);
  read(warp().words);
  wait(warp().barrier);
}

}  // namespace simt

struct FlatIndex {
  int x;
};
inline FlatIndex threadIdx;
inline FlatIndex blockIdx;

// Named in parts of CUTLASS's headers that the kernels do not use.
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
template <class A, class B, class C>
A __hfma2(A, B, C);

inline void __syncthreads() { simt::wait(simt::block->barrier); }

inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  simt::exchange<1>({bits}, [&](auto const& words) {
    bits = static_cast<uint32_t>(words[simt::lane() ^ lane_mask][0]);
  });
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

namespace simt {

inline std::function<void()> const* fiber_body = nullptr;

inline void fiber_main() {
  (*fiber_body)();
  thread().done = true;
  block->progress = true;
  swapcontext(&thread().context, &block->scheduler);
}

inline void Block::run(std::function<void()> const& body) {
  constexpr int kStackBytes = 256 * 1024;
  block = this;
  fiber_body = &body;
  for (Thread& t : threads) {
    t.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&t.context);
    t.context.uc_stack = {t.stack.get(), 0, kStackBytes};
    t.context.uc_link = nullptr;
    makecontext(&t.context, fiber_main, 0);
  }
  for (size_t done = 0; done < threads.size();) {
    done = 0;
    progress = false;
    for (current = 0; current < static_cast<int>(threads.size()); ++current) {
      threadIdx.x = current;
      if (threads[current].done) {
        ++done;
      } else {
        swapcontext(&scheduler, &threads[current].context);
      }
    }
    if (!progress && done < threads.size()) {
      throw std::logic_error("threads wait at different barriers");
    }
  }
}

}  // namespace simt
