// Which thread of a cluster goes on, until all have ended.
#pragma once

#include "simt.h"

namespace simt {

inline std::function<void()> const* fiber_body = nullptr;

inline void fiber_main() {
  try {
    (*fiber_body)();
  } catch (...) {
    block->error = std::current_exception();
  }
  thread().done = true;
  _longjmp(block->scheduler, 1);
}

// ---- a block ------------------------------------------------------------------------------------

constexpr int kStackBytes = 256 * 1024;

inline void Block::start(std::unique_ptr<char[]> const* stacks) {
  for (size_t i = 0; i < threads.size(); ++i) {
    getcontext(&threads[i].start);
    threads[i].start.uc_stack = {stacks[i].get(), 0, kStackBytes};
    threads[i].start.uc_link = nullptr;
    makecontext(&threads[i].start, fiber_main, 0);
  }
}

inline void Block::enter() {
  block = running = this;
  blockIdx.x = index;
  current = kNoThread;
}

// Until the thread has to wait. Whether it did more than ask again.
[[gnu::noinline]] inline bool Block::resume(int thread) {
  current = threadIdx.x = thread;
  Thread& t = threads[thread];
  t.polls = false;
  t.waits = nullptr;
  if (_setjmp(scheduler) == 0) {
    if (t.started) {
      _longjmp(t.here, 1);
    }
    t.started = true;
    setcontext(&t.start);
  }
  if (error) {
    std::rethrow_exception(error);
  }
  if (threads[current].done) {
    thread_ends();
    return true;
  }
  return !threads[current].polls;
}

inline void Block::thread_ends() {
  Thread const& t = threads[current];
  if (!t.copies.empty()) {
    throw std::logic_error("a thread ends before its asynchronous copies do");
  }
  for (auto const& unit : units_) {
    if (unit) {
      unit->thread_ends(current);
    }
  }
  ClusterBarrier& all = cluster.barrier;
  --all.expected;
  if (t.cluster_generation <= all.generation) {  // it has not arrived
    all.count();
  }
  if (--running_ == 0) {
    ends();
  }
}

inline void Block::ends() {
  current = kNoThread;
  for (auto const& unit : units_) {
    if (unit) {
      unit->block_ends();
    }
  }
  count_copies();
}

// Whether anything happened.
inline bool Block::run_warp(int warp) {
  for (bool any = false;; any = true) {
    bool progress = false;
    for (int i = 0; i < kWarp; ++i) {
      int const thread = warp * kWarp + (order.last_first ? kWarp - 1 - i : i);
      Thread const& t = threads[thread];
      if (!t.done && !(t.waits && !t.waits->over())) {
        progress |= resume(thread);
      }
    }
    if (!progress || order.in_turns) {
      return any || progress;
    }
  }
}

inline bool Block::run_warps() {
  enter();
  int const last = static_cast<int>(warps.size()) - 1;
  for (bool any = false;; any = true) {
    bool progress = false;
    for (int i = 0; i <= last; ++i) {
      progress |= run_warp(order.last_first ? last - i : i);
    }
    if (!progress || order.in_turns) {
      return any || progress;
    }
  }
}

inline bool Block::advance_units() {
  enter();
  auto const advances = [](auto const& unit) { return unit && unit->advance(); };
  return order.newest_first ? std::any_of(units_.rbegin(), units_.rend(), advances)
                            : std::any_of(units_.begin(), units_.end(), advances);
}

inline void Block::count_copies() const {
  for (size_t warp = 0; warp < warps.size(); ++warp) {
    std::vector<uintptr_t> const* lanes[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      lanes[lane] = &threads[warp * kWarp + lane].copy_targets;
    }
    count_lanes("cp.async", lanes);
  }
}

inline std::string Block::stuck() const {
  auto const wait_of = [](Thread const& t) {
    return t.done ? "" : t.waits ? t.waits->what() : "what it polls";
  };
  std::string const me = cluster.blocks.size() > 1 ? concat("block ", rank, ", ") : "";
  std::string all;
  for (size_t begin = 0, end; begin < threads.size(); begin = end) {
    std::string const what = wait_of(threads[begin]);
    for (end = begin + 1; end < threads.size() && wait_of(threads[end]) == what; ++end) {
    }
    if (!what.empty()) {
      all += concat("\n  ", me, "threads ", begin, " to ", end - 1, " wait for ", what);
    }
  }
  return all;
}

// ---- a cluster ----------------------------------------------------------------------------------

inline void Cluster::start() {
  // Kept from cluster to cluster: new memory costs more than a small block does.
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < static_cast<size_t>(barrier.expected)) {
    stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
  }
  auto const* next = stacks.data();
  for (Block& block : blocks) {
    block.start(next);
    next += block.threads.size();
  }
}

// Until no thread of any block can go on.
inline void Cluster::run_blocks() {
  bool const backwards = blocks.front().order.last_first;
  size_t const count = blocks.size();
  // Blocks in a row that have nothing to do, be it that they have just done it all.
  size_t idle = 0;
  for (size_t turn = 0; idle < count; ++turn) {
    Block& next = blocks[backwards ? count - 1 - turn % count : turn % count];
    bool const happened = next.run_warps();
    idle = !happened ? idle + 1 : next.order.in_turns ? 0 : 1;
  }
}

inline bool Cluster::advance_units() {
  auto const advances = [](Block& block) { return block.advance_units(); };
  return blocks.front().order.newest_first ? std::any_of(blocks.rbegin(), blocks.rend(), advances)
                                           : std::any_of(blocks.begin(), blocks.end(), advances);
}

inline void Cluster::run(std::function<void()> const& body) {
  fiber_body = &body;
  start();
  do {
    run_blocks();
  } while (barrier.expected > 0 && advance_units());
  std::string who;
  for (Block const& block : blocks) {
    who += block.stuck();
  }
  if (!who.empty()) {
    throw std::logic_error("deadlock:" + who);
  }
}

}  // namespace simt
