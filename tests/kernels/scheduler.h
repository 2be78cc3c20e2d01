// Which thread goes on, of which block, of which cluster, until all have ended.
#pragma once

#include <random>

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

// Stacks of threads that have ended: new memory costs more than a small block does.
inline std::vector<std::unique_ptr<char[]>> free_stacks;

inline std::unique_ptr<char[]> take_stack() {
  if (free_stacks.empty()) {
    return std::make_unique_for_overwrite<char[]>(kStackBytes);
  }
  std::unique_ptr<char[]> stack = std::move(free_stacks.back());
  free_stacks.pop_back();
  return stack;
}

// Stacks begin at different places of a page: all of a block's at the same one would share a
// cache's few lines for that place.
inline void Block::start() {
  constexpr size_t kLine = 64, kLinesOfPage = 64;
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.stack = take_stack();
    getcontext(&thread.start);
    thread.start.uc_stack = {thread.stack.get(), 0, kStackBytes - i % kLinesOfPage * kLine};
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, fiber_main, 0);
  }
}

inline Block::~Block() {
  for (Thread& thread : threads) {
    if (thread.stack) {
      free_stacks.push_back(std::move(thread.stack));
    }
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

// The number that all of a warp's threads wait for; null: one of them can go on without, or they
// wait for several.
inline int const* Block::watched_by(int warp) const {
  static constexpr int kNever = 0;
  int const* number = nullptr;
  for (int i = 0; i < kWarp; ++i) {
    Thread const& t = threads[warp * kWarp + i];
    if (t.done) {
      continue;
    }
    if (!t.waits || (number && number != &t.waits->number)) {
      return nullptr;
    }
    number = &t.waits->number;
  }
  return number ? number : &kNever;
}

// Whether anything happened.
inline bool Block::run_warp(int warp) {
  Warp& all = warps[warp];
  if (all.watched && *all.watched == all.seen) {
    return false;
  }
  for (bool any = false;; any = true) {
    bool progress = false;
    for (int i = 0; i < kWarp; ++i) {
      int const thread = warp * kWarp + (order.last_first ? kWarp - 1 - i : i);
      Thread const& t = threads[thread];
      if (!t.done && !(t.waits && !t.waits->over())) {
        progress |= resume(thread);
      }
    }
    all.watched = progress ? nullptr : watched_by(warp);
    if (all.watched) {
      all.seen = *all.watched;
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
  std::string const me = gridDim.x > 1 ? concat("block ", index, ", ") : "";
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
  for (Block& block : blocks) {
    block.start();
  }
}

inline bool Cluster::go_on(size_t turns) {
  bool const backwards = blocks.front().order.last_first;
  size_t const count = blocks.size();
  bool any = false;
  // Blocks in a row that have nothing to do, be it that they have just done it all.
  size_t idle = 0;
  for (size_t last = turn_ + turns; turn_ < last && !has_ended(); ++turn_) {
    Block& next = blocks[backwards ? count - 1 - turn_ % count : turn_ % count];
    bool const happened = next.run_warps();
    any |= happened;
    idle = !happened ? idle + 1 : next.order.in_turns ? 0 : 1;
    // When no thread of any block can go on.
    if (idle == count && !has_ended()) {
      if (!advance_units()) {
        break;
      }
      any = true;
      idle = 0;
    }
  }
  return any;
}

inline bool Cluster::advance_units() {
  auto const advances = [](Block& block) { return block.advance_units(); };
  return blocks.front().order.newest_first ? std::any_of(blocks.rbegin(), blocks.rend(), advances)
                                           : std::any_of(blocks.begin(), blocks.end(), advances);
}

// ---- a launch -----------------------------------------------------------------------------------

// Where clusters of a launch run, one after the other; all places at the same time.
class Place {
 public:
  virtual ~Place() = default;
  // The next of the launch's clusters; null: there is none left.
  virtual std::unique_ptr<Cluster> next() = 0;
  virtual void has_ended() = 0;

  void start() {
    if ((cluster_ = next())) {
      cluster_->start();
    }
  }

  // For so many turns of each block, or until none can. Whether anything happened.
  bool go_on(size_t turns) {
    if (!cluster_ || !cluster_->go_on(turns * cluster_->blocks.size())) {
      return false;
    }
    if (cluster_->has_ended()) {
      cluster_.reset();
      has_ended();
      start();
    }
    return true;
  }

  std::string stuck() const {
    std::string all;
    for (size_t i = 0; cluster_ && i < cluster_->blocks.size(); ++i) {
      all += cluster_->blocks[i].stuck();
    }
    return all;
  }

 private:
  std::unique_ptr<Cluster> cluster_;
};

// Runs `body` as every thread of every cluster. Where there are several places, chance says which
// of them goes on, and how far: from a turn of each block to as many as take it to its end.
inline void run_places(std::vector<std::unique_ptr<Place>> const& places, uint64_t seed,
                       std::function<void()> const& body) {
  constexpr size_t kAll = 1 << 30, kMostLog2 = 12;
  fiber_body = &body;
  std::mt19937_64 chance(seed);
  size_t const count = places.size();
  for (auto const& place : places) {
    place->start();
  }
  for (bool any = true; any;) {
    size_t const first = count > 1 ? chance() % count : 0;
    size_t const turns = count > 1 ? size_t{1} << chance() % (kMostLog2 + 1) : kAll;
    any = false;
    // If the one that chance picks cannot go on, the next that can.
    for (size_t i = 0; i < count && !any; ++i) {
      any = places[(first + i) % count]->go_on(turns);
    }
  }
  std::string stuck;
  for (auto const& place : places) {
    stuck += place->stuck();
  }
  if (!stuck.empty()) {
    throw std::logic_error("deadlock:" + stuck);
  }
}

}  // namespace simt
