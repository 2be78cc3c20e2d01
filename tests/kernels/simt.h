// Thread blocks on the host: their threads are fibers that take turns and switch only where they
// wait for each other. intrinsics.h has CUDA's names for what is here, scheduler.h says whose turn
// it is.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
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

// What a thread waits for, and how it is called when no thread brings it about.
struct Wait {
  int const& number;  // nothing else decides whether the wait is over

  virtual bool over() const = 0;
  virtual std::string what() const = 0;

 protected:
  explicit Wait(int const& number) : number(number) {}
  ~Wait() = default;
};

// All of `count` threads arrive before any goes on.
struct Barrier {
  int count = 0;
  char const* name = "";
  int arrived = 0;
  int generation = 0;
};

// The barrier of all threads of a cluster: they arrive, and wait another time. Those that have
// ended are not waited for.
struct ClusterBarrier {
  int expected = 0;  // threads that have not ended
  int missing = 0;   // of them, in this generation
  int generation = 0;

  void count() {
    if (--missing == 0) {
      missing = expected;
      ++generation;
    }
  }
};

// A memory read that a thread has asked for and that has not arrived.
struct PendingCopy {
  static constexpr int kMostBytes = 16;
  void* target;
  void const* source;  // null: zeros
  int bytes;
  int group;
  std::array<std::byte, kMostBytes> issued;  // what the source was then
};

struct Thread {
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf here;  // where it goes on; swapcontext would do, but for a system call at each switch
  bool started = false;
  bool done = false;
  bool polls = false;           // asks again and again, with nothing that says when to stop
  Wait const* waits = nullptr;  // null: it can go on
  std::vector<PendingCopy> copies;
  std::vector<uintptr_t> copy_targets;  // of all its copies, for the bank counts
  int groups = 0;                       // of copies that were committed
  int cluster_generation = 0;  // what it waits for after an arrival at the cluster's barrier
};

// What the lanes of a warp show each other in collective instructions. Two buffers: a lane that is
// late to read one finds it untouched, since no lane passes the next instruction without it.
struct Warp {
  static constexpr int kBytes = 48;
  Barrier barrier{kWarp, "the rest of its warp"};
  // While *watched is `seen`, none of its threads can go on; null: one may.
  int const* watched = nullptr;
  int seen = 0;
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
  bool last_first;    // of the warps, of a warp's lanes, and, in a cluster's first, of the blocks
  bool newest_first;  // of asynchronous operations
  bool in_turns;      // warps and blocks, at every wait; else each goes as far as it can
  int elected;        // the lane that elect.sync picks

  // Neighbours differ as much as possible, so that few of them try most of it.
  static Order of(uint64_t number) {
    constexpr int kChoices[8] = {0, 7, 2, 5, 4, 3, 6, 1};
    int const bits = kChoices[number % 8];
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, bits * 5 % kWarp};
  }
};

// The order of a launch's first block; the next blocks take others.
inline uint64_t first_order = 0;

constexpr int kNoThread = -1;

inline int num_units = 0;
template <class U>
inline int const unit_slot = num_units++;

class Cluster;

class Block {
 public:
  // What a launch gives it.
  struct Setup {
    int index;
    int threads;
    char* smem;
    int smem_bytes;
    Order order;
  };

  Block(Cluster& cluster, uint32_t rank, Setup const& setup)
      : cluster(cluster),
        rank(rank),
        index(setup.index),
        order(setup.order),
        threads(setup.threads),
        warps(setup.threads / kWarp),
        smem(setup.smem),
        smem_bytes(setup.smem_bytes),
        running_(setup.threads) {
    barrier.count = setup.threads;
  }
  ~Block();

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

  void start();
  // Until every warp has to wait, or one turn of each. Whether anything happened.
  bool run_warps();
  bool advance_units();
  // Which threads wait for what, one line for each run of threads that wait for the same.
  std::string stuck() const;
  // On a GPU its shared memory is another block's from then on.
  bool has_ended() const { return running_ == 0; }

  Cluster& cluster;
  uint32_t const rank;  // in the cluster
  int const index;      // blockIdx.x
  Order const order;
  Barrier barrier{0, "__syncthreads"};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  char* const smem;
  int const smem_bytes;
  jmp_buf scheduler;
  std::exception_ptr error;  // of a thread
  int current = kNoThread;
  bool any = false;  // what __syncthreads_or has seen

 private:
  void enter();
  bool resume(int thread);
  bool run_warp(int warp);
  int const* watched_by(int warp) const;
  void thread_ends();
  void ends();
  void count_copies() const;

  int running_;  // threads
  std::vector<std::unique_ptr<Unit>> units_;
};

// Blocks that run at the same time and reach each other's shared memory.
class Cluster {
 public:
  void add(Block::Setup const& setup) {
    blocks.emplace_back(*this, static_cast<uint32_t>(blocks.size()), setup);
    barrier.missing = barrier.expected += setup.threads;
  }

  void start();
  // For so many turns of its blocks, or until none can go on. Whether anything happened. Rethrows
  // what a thread throws.
  bool go_on(size_t turns);
  bool has_ended() const { return barrier.expected == 0; }

  // Whether a block can know that another one has begun: by the barrier.
  bool have_begun() const { return barrier.generation > 0; }

  std::deque<Block> blocks;
  ClusterBarrier barrier;

 private:
  bool advance_units();

  size_t turn_ = 0;
};

// The block whose thread or unit is at work, and the block whose shared memory and units it works
// with: they differ only inside an access to another block.
inline Block* running = nullptr;
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
    explicit NextGeneration(Barrier const& b)
        : Wait(b.generation), barrier(b), generation(b.generation) {}
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

// Which thread of which block is at work, and in whose memory, as far as there is a choice.
inline std::string actor() {
  Block const& me = *running;
  std::string const thread = me.current == kNoThread ? "" : concat("thread ", me.current);
  if (me.cluster.blocks.size() == 1) {
    return thread;
  }
  std::string const where = block == running ? "" : concat(" in block ", block->rank);
  return concat("block ", me.rank, thread.empty() ? "" : ", ", thread, where);
}

template <class... Parts>
void expect(bool holds, Parts const&... otherwise) {
  if (!holds) {
    std::string const thread = actor();
    throw std::logic_error(concat(thread, thread.empty() ? "" : ": ", otherwise...));
  }
}

}  // namespace simt
