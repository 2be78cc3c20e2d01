// A thread block on the host: its threads are fibers that take turns and switch only where they
// wait for each other. intrinsics.h has CUDA's names for what is here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "banks.h"

// Kernels use one dimension.
struct FlatIndex {
  int x;
};
inline FlatIndex threadIdx;
inline FlatIndex blockIdx;
inline FlatIndex blockDim;
inline FlatIndex gridDim;

namespace simt {

constexpr int kWarp = 32;

// Shared memory before a kernel writes there: NaN in either dtype, an integer out of all bounds.
constexpr uint16_t kPoison = 0x7fff;

// What a thread waits for, and how it is called when nobody brings it about.
struct Wait {
  virtual bool over() const = 0;
  virtual std::string what() const = 0;

 protected:
  ~Wait() = default;
};

// All of `count` threads arrive before any goes on.
struct Barrier {
  int count = 0;
  char const* name = "";
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
  bool polls = false;           // asks again and again, with nothing that says when to stop
  Wait const* waits = nullptr;  // null: it can go on
  std::vector<PendingCopy> copies;
  std::vector<uintptr_t> copy_targets;  // of all its copies, for the bank counts
  int groups = 0;                       // of copies that were committed
};

// What the lanes of a warp show each other in collective instructions. Two buffers: a lane that is
// late to read one finds it untouched, since nobody passes the next instruction without it.
struct Warp {
  static constexpr int kBytes = 48;
  Barrier barrier{kWarp, "the rest of its warp"};
  alignas(16) char shown[2][kWarp][kBytes];
};

// Part of a block that works beside its threads: barriers in memory, copies, matrix products.
struct Unit {
  virtual ~Unit() = default;
  // One more thing that may happen any time; called when no thread can go on. False: nothing to do.
  virtual bool advance() { return false; }
  // Throws if the thread, or the block, must not end like this.
  virtual void thread_ends(int /*thread*/) {}
  virtual void block_ends() {}
};

// What a GPU leaves open. Kernels have to be right whatever the choice.
struct Order {
  bool last_first;    // of the warps, and of a warp's lanes
  bool newest_first;  // of asynchronous operations
  bool in_turns;      // warps, at every wait; else each goes as far as it can
  int elected;        // the lane that elect.sync picks

  // Neighbours differ as much as possible, so that few of them try most of it.
  static Order of(uint64_t number) {
    constexpr int kChoices[8] = {0, 7, 2, 5, 4, 3, 6, 1};
    int const bits = kChoices[number % 8];
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, bits * 5 % kWarp};
  }
};

// Of a launch's first block; the next blocks take the next ones.
inline uint64_t first_order = 0;

inline int num_units = 0;
template <class U>
inline int const unit_slot = num_units++;

class Block {
 public:
  Block(int threads, char* smem, int smem_bytes, Order order)
      : order(order), threads(threads), warps(threads / kWarp), smem(smem), smem_bytes(smem_bytes) {
    barrier.count = threads;
  }

  // Runs `body` as every thread of the block, to its end. Rethrows what a thread throws.
  void run(std::function<void()> const& body);

  // The block's U, made when first asked for.
  template <class U>
  U& unit() {
    size_t const slot = unit_slot<U>;
    units_.resize(std::max(units_.size(), slot + 1));
    if (!units_[slot]) {
      units_[slot] = std::make_unique<U>();
    }
    return static_cast<U&>(*units_[slot]);
  }

  Order const order;
  Barrier barrier{0, "__syncthreads"};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  char* const smem;
  int const smem_bytes;
  jmp_buf scheduler;
  std::exception_ptr error;  // of a thread
  int current = 0;
  bool any = false;  // what __syncthreads_or has seen

 private:
  void start();
  bool resume(int thread);
  bool run_warp(int warp);
  bool all_done() const;
  bool advance_units();
  std::string stuck() const;
  void count_copies() const;

  std::vector<std::unique_ptr<Unit>> units_;
};

inline Block* block = nullptr;
constexpr int kNoThread = -1;

inline int lane() { return block->current % kWarp; }
inline Warp& warp() { return block->warps[block->current / kWarp]; }
inline Thread& thread() { return block->threads[block->current]; }

// To the scheduler and back. Not inlined: setjmp keeps a function's variables in memory.
[[gnu::noinline]] inline void yield() {
  if (_setjmp(thread().here) == 0) {
    _longjmp(block->scheduler, 1);
  }
}

inline void wait_for(Wait const& wait) {
  if (!wait.over()) {
    thread().waits = &wait;
    yield();
  }
}

// Lets the others go on; for loops that ask for something.
inline void poll() {
  thread().polls = true;
  yield();
}

inline void wait(Barrier& barrier) {
  struct NextGeneration : Wait {
    Barrier const& barrier;
    int const generation;
    explicit NextGeneration(Barrier const& b) : barrier(b), generation(b.generation) {}
    bool over() const override { return barrier.generation != generation; }
    std::string what() const override { return barrier.name; }
  } const next{barrier};
  if (++barrier.arrived == barrier.count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  wait_for(next);
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

// A number as it is written for addresses.
struct Hex {
  uint32_t value;
  friend std::ostream& operator<<(std::ostream& out, Hex hex) {
    return out << "0x" << std::hex << hex.value << std::dec;
  }
};

template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
void expect(bool holds, Parts const&... otherwise) {
  if (!holds) {
    bool const in_thread = block->current != kNoThread;
    std::string const who = in_thread ? concat("thread ", block->current, ": ") : "";
    throw std::logic_error(concat(who, otherwise...));
  }
}

// ---- the scheduler -----------------------------------------------------------------------------

inline std::function<void()> const* fiber_body = nullptr;

inline void end_thread() {
  if (!thread().copies.empty()) {
    throw std::logic_error("a thread ends before its asynchronous copies do");
  }
}

inline void fiber_main() {
  try {
    (*fiber_body)();
  } catch (...) {
    block->error = std::current_exception();
  }
  thread().done = true;
  _longjmp(block->scheduler, 1);
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
    end_thread();
    for (auto const& unit : units_) {
      if (unit) {
        unit->thread_ends(current);
      }
    }
  }
  return !threads[current].polls;
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

inline bool Block::all_done() const {
  return std::all_of(threads.begin(), threads.end(), [](Thread const& t) { return t.done; });
}

inline bool Block::advance_units() {
  current = kNoThread;
  auto const advances = [](auto const& unit) { return unit && unit->advance(); };
  return order.newest_first ? std::any_of(units_.rbegin(), units_.rend(), advances)
                            : std::any_of(units_.begin(), units_.end(), advances);
}

inline void Block::start() {
  constexpr int kStackBytes = 256 * 1024;
  // Kept from block to block: new memory costs more than a small block does.
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < threads.size()) {
    stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
  }
  for (size_t i = 0; i < threads.size(); ++i) {
    getcontext(&threads[i].start);
    threads[i].start.uc_stack = {stacks[i].get(), 0, kStackBytes};
    threads[i].start.uc_link = nullptr;
    makecontext(&threads[i].start, fiber_main, 0);
  }
}

inline void Block::run(std::function<void()> const& body) {
  block = this;
  fiber_body = &body;
  start();
  int const last = static_cast<int>(warps.size()) - 1;
  do {
    for (bool any = true; any;) {
      any = false;
      for (int i = 0; i <= last; ++i) {
        any |= run_warp(order.last_first ? last - i : i);
      }
    }
  } while (!all_done() && advance_units());
  if (std::string const who = stuck(); !who.empty()) {
    throw std::logic_error("deadlock:" + who);
  }
  current = kNoThread;
  for (auto const& unit : units_) {
    if (unit) {
      unit->block_ends();
    }
  }
  count_copies();
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

// Who waits for what, one line for each run of threads that wait for the same.
inline std::string Block::stuck() const {
  auto const wait_of = [](Thread const& t) {
    return t.done ? "" : t.waits ? t.waits->what() : "what it polls";
  };
  std::string all;
  for (size_t begin = 0, end; begin < threads.size(); begin = end) {
    std::string const what = wait_of(threads[begin]);
    for (end = begin + 1; end < threads.size() && wait_of(threads[end]) == what; ++end) {
    }
    if (!what.empty()) {
      all += concat("\n  threads ", begin, " to ", end - 1, " wait for ", what);
    }
  }
  return all;
}

}  // namespace simt
