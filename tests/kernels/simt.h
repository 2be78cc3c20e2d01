// A thread block on the host: its threads are fibers that take turns and switch at barriers only.
// Enough of CUDA's vocabulary to compile the kernels of csrc/ unchanged with a host compiler.
#pragma once

#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "banks.h"

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
  int group;
};

struct Thread {
  ucontext_t start;
  jmp_buf here;  // where it goes on; swapcontext would do, but for a system call at each switch
  bool started = false;
  bool done = false;
  std::vector<PendingCopy> copies;
  std::vector<uintptr_t> copy_targets;  // of all its copies, for the bank counts
  int groups = 0;                       // of copies that were committed
};

// What the lanes of a warp show each other in collective instructions. Two buffers: a lane that is
// late to read one finds it untouched, since nobody passes the next instruction without it.
struct Warp {
  static constexpr int kBytes = 48;
  Barrier barrier;
  alignas(16) char shown[2][kWarp][kBytes];
};

struct Block {
  explicit Block(int threads) : warps(threads / kWarp), threads(threads) {
    barrier.count = threads;
    for (Warp& warp : warps) {
      warp.barrier.count = kWarp;
    }
  }

  // Runs `body` as every thread of the block, to its end. Each warp runs as far ahead of the others
  // as barriers allow, the first warp first or, if `reversed`, the last one.
  void run(std::function<void()> const& body, bool reversed);

  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  jmp_buf scheduler;
  std::exception_ptr failure;  // of a thread
  int current = 0;
  bool progress = false;
  bool any = false;  // what __syncthreads_or has seen

 private:
  void resume(int thread);
  bool run_warp(int warp);
};

inline Block* block = nullptr;

inline int lane() { return block->current % kWarp; }
inline Warp& warp() { return block->warps[block->current / kWarp]; }
inline Thread& thread() { return block->threads[block->current]; }

// To the scheduler and back. Not inlined: setjmp keeps a function's variables in memory.
[[gnu::noinline]] inline void yield() {
  if (_setjmp(thread().here) == 0) {
    _longjmp(block->scheduler, 1);
  }
}

inline void wait(Barrier& barrier) {
  block->progress = true;
  int const generation = barrier.generation;
  if (++barrier.arrived == barrier.count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) {
    yield();
  }
}

// Every lane shows `mine`; `read` is called with a function from a lane to what that one shows.
template <class T, int kSize, class Read>
void exchange(T const (&mine)[kSize], Read read) {
  static_assert(sizeof(mine) <= Warp::kBytes);
  auto& shown = warp().shown[warp().barrier.generation % 2];
  std::memcpy(shown[lane()], mine, sizeof(mine));
  wait(warp().barrier);
  read([&](int lane) { return reinterpret_cast<T const*>(shown[lane]); });
}

}  // namespace simt

struct FlatIndex {
  int x;
};
inline FlatIndex threadIdx;
inline FlatIndex blockIdx;
inline FlatIndex blockDim;
inline FlatIndex gridDim;

// Named in parts of CUTLASS's headers that the kernels do not use.
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
template <class A, class B, class C>
A __hfma2(A, B, C);

inline void __syncthreads() { simt::wait(simt::block->barrier); }

inline int __syncthreads_or(int condition) {
  simt::Block& block = *simt::block;
  block.any |= condition != 0;
  __syncthreads();
  bool const any = block.any;
  __syncthreads();
  block.any = false;
  __syncthreads();
  return any;
}

inline void __syncwarp() { simt::wait(simt::warp().barrier); }

namespace simt {

// What `lane` shows; a lane that does not exist shows one's own, as the shuffles say.
template <class T>
T shown_by(int lane, T value) {
  T result;
  T const mine[1] = {value};
  exchange(mine, [&](auto of) { result = lane >= 0 && lane < kWarp ? *of(lane) : value; });
  return result;
}

}  // namespace simt

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return simt::shown_by(lane % simt::kWarp, value);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  return simt::shown_by(simt::lane() ^ lane_mask, value);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  return simt::shown_by(simt::lane() - distance, value);
}

inline unsigned __ballot_sync(unsigned, bool condition) {
  unsigned lanes = 0;
  bool const mine[1] = {condition};
  simt::exchange(mine, [&](auto of) {
    for (int lane = 0; lane < simt::kWarp; ++lane) {
      lanes |= unsigned(*of(lane)) << lane;
    }
  });
  return lanes;
}

inline int __any_sync(unsigned, bool condition) { return __ballot_sync(~0u, condition) != 0; }

inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Threads take turns, so nothing can come between.
template <class T>
T atomicAdd(T* target, T value) {
  T const before = *target;
  *target += value;
  return before;
}
inline void __threadfence() {}

// Blocks run one after the other: what a block polls for will not come.
inline void __nanosleep(unsigned) {
  throw std::logic_error("a block waits for one that is launched after it");
}

namespace simt {

inline std::function<void()> const* fiber_body = nullptr;

inline void fiber_main() {
  try {
    (*fiber_body)();
  } catch (...) {
    block->failure = std::current_exception();  // no further: the stack below is the scheduler's
  }
  thread().done = true;
  block->progress = true;
  _longjmp(block->scheduler, 1);
}

// Until the thread comes to a barrier that others have not reached.
[[gnu::noinline]] inline void Block::resume(int thread) {
  current = threadIdx.x = thread;
  if (_setjmp(scheduler) != 0) {
    return;
  }
  if (threads[thread].started) {
    _longjmp(threads[thread].here, 1);
  }
  threads[thread].started = true;
  setcontext(&threads[thread].start);
}

// Whether anything happened.
inline bool Block::run_warp(int warp) {
  for (bool any = false;; any = true) {
    progress = false;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (!threads[warp * kWarp + lane].done) {
        resume(warp * kWarp + lane);
      }
    }
    if (!progress) {
      return any;
    }
  }
}

inline void Block::run(std::function<void()> const& body, bool reversed) {
  constexpr int kStackBytes = 256 * 1024;
  // Kept from block to block: new memory costs more than a small block does.
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < threads.size()) {
    stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
  }
  block = this;
  fiber_body = &body;
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& t = threads[i];
    getcontext(&t.start);
    t.start.uc_stack = {stacks[i].get(), 0, kStackBytes};
    t.start.uc_link = nullptr;
    makecontext(&t.start, fiber_main, 0);
  }
  int const last = static_cast<int>(warps.size()) - 1;
  for (bool any = true; any;) {
    any = false;
    for (int i = 0; i <= last; ++i) {
      any |= run_warp(reversed ? last - i : i);
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (Thread const& t : threads) {
    if (!t.done) {
      throw std::logic_error("threads wait at different barriers");
    }
    if (!t.copies.empty()) {
      throw std::logic_error("a thread ends before its asynchronous copies do");
    }
  }
  for (size_t warp = 0; warp < warps.size(); ++warp) {
    std::vector<uintptr_t> const* lanes[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      lanes[lane] = &threads[warp * kWarp + lane].copy_targets;
    }
    count_lanes("cp.async", lanes);
  }
}

}  // namespace simt
