// mbarrier, and the sixteen named barriers of a block.
#pragma once

#include <unordered_map>

#include "shared_memory.h"

namespace simt {

// ---- mbarrier -----------------------------------------------------------------------------------

// A phase ends when all arrivals and all announced bytes are there. Its 64 bits in shared memory
// only say that it is intact; the rest is kept where kernels cannot write.
class MBarriers : public Unit {
 public:
  struct State {
    int64_t count;     // arrivals a phase takes
    int64_t missing;   // arrivals
    int64_t tx_bytes;  // announced and not there yet; negative while they come unannounced
    int phase;
    bool fenced = false;  // its initialisation, for other blocks of the cluster
  };

  void init(uint32_t address, uint32_t count) {
    expect(address % 8 == 0, "mbarrier at ", Hex{address}, " is not 8-byte aligned");
    expect(count > 0 && count < (1 << 20), "mbarrier for ", count, " arrivals");
    expect(!states_.contains(address), "mbarrier at ", Hex{address}, " is initialised twice");
    states_[address] = {count, count, 0, 0};
    std::memcpy(smem_pointer(address, 8), &kIntact, sizeof(kIntact));
  }

  // On a GPU this concerns one thread, here all of them.
  void fence_init() {
    for (auto& [address, state] : states_) {
      state.fenced = true;
    }
  }

  void invalidate(uint32_t address) {
    at(address);
    states_.erase(address);
  }

  State& at(uint32_t address) {
    auto const found = states_.find(address);
    expect(found != states_.end(), "mbarrier at ", Hex{address}, " is not initialised");
    expect(std::memcmp(smem_pointer(address, 8), &kIntact, sizeof(kIntact)) == 0, "mbarrier at ",
           Hex{address}, " has been overwritten");
    expect(found->second.fenced || block == running, "mbarrier at ", Hex{address},
           " is used by another block, with no fence_barrier_init since it was initialised");
    return found->second;
  }

  void arrive(uint32_t address) {
    State& state = at(address);
    expect(state.missing > 0, "one arrival too many at mbarrier ", Hex{address});
    --state.missing;
    complete(state);
  }

  // Positive: announced; negative: there.
  void add_bytes(uint32_t address, int64_t bytes) {
    State& state = at(address);
    state.tx_bytes += bytes;
    expect(std::abs(state.tx_bytes) < (1 << 20), "too many bytes at mbarrier ", Hex{address});
    complete(state);
  }

 private:
  static constexpr uint64_t kIntact = 0x6d62'6172'7269'6572;

  static void complete(State& state) {
    if (state.missing == 0 && state.tx_bytes == 0) {
      state.missing = state.count;
      ++state.phase;
    }
  }

  std::unordered_map<uint32_t, State> states_;
};

inline MBarriers& mbarriers() { return block->unit<MBarriers>(); }

// The phase of this parity has ended: the barrier is in one of the other parity.
struct PhaseEnd : Wait {
  uint32_t const address;
  uint32_t const parity;
  MBarriers::State const& state;

  PhaseEnd(void const* barrier, uint32_t parity)
      : PhaseEnd(smem_address(barrier), parity, mbarriers().at(smem_address(barrier))) {
    expect(parity <= 1, "an mbarrier's phase is waited for by its parity, not as ", parity);
  }
  bool over() const override { return static_cast<uint32_t>(state.phase) % 2 != parity; }
  std::string what() const override {
    return concat("mbarrier ", Hex{address}, ", parity ", parity, " (", state.missing, " of ",
                  state.count, " arrivals and ", state.tx_bytes, " bytes to come)");
  }

 private:
  PhaseEnd(uint32_t address, uint32_t parity, MBarriers::State const& state)
      : Wait(state.phase), address(address), parity(parity), state(state) {}
};

inline bool phase_has_ended(void const* barrier, uint32_t parity) {
  bool const over = PhaseEnd(barrier, parity).over();
  if (!over) {
    poll();
  }
  return over;
}

// ---- named barriers -----------------------------------------------------------------------------

// Barrier 0 is __syncthreads, which is elsewhere. Warps arrive whole; some wait, others
// (bar.arrive) go on.
class NamedBarriers : public Unit {
 public:
  void arrive(uint32_t id, uint32_t count) {
    expect(id > 0 && id < 16, "there is no named barrier ", id);
    expect(count > 0 && count % kWarp == 0, "barrier ", id, " is for ", count, " threads");
    State& state = states_[id];
    expect(state.arrived == 0 || state.count == count, "barrier ", id, " is for ", state.count,
           " and for ", count, " threads");
    state.count = count;
    state.lanes.resize(block->warps.size());
    uint32_t& lanes = state.lanes[block->current / kWarp];
    expect((lanes >> lane() & 1) == 0, "barrier ", id, ": the thread arrives twice");
    lanes |= 1u << lane();
    if (++state.arrived == count) {
      for (uint32_t const arrived : state.lanes) {
        expect(arrived == 0 || arrived == 0xffffffff, "barrier ", id, ": a part of a warp arrives");
      }
      state.lanes.clear();
      state.arrived = 0;
      ++state.generation;
    }
  }

  void arrive_and_wait(uint32_t id, uint32_t count) {
    struct Full : Wait {
      State const& state;
      uint32_t const id;
      int const generation;
      Full(State const& s, uint32_t id)
          : Wait(s.generation), state(s), id(id), generation(s.generation) {}
      bool over() const override { return state.generation != generation; }
      std::string what() const override {
        return concat("named barrier ", id, " (", state.arrived, " of ", state.count,
                      " threads are there)");
      }
    } const full{states_[id % 16], id};
    arrive(id, count);
    wait_for(full);
  }

 private:
  struct State {
    uint32_t count = 0;
    uint32_t arrived = 0;
    int generation = 0;
    std::vector<uint32_t> lanes;  // of each warp, those that have arrived
  };

  State states_[16];
};

inline NamedBarriers& named_barriers() { return block->unit<NamedBarriers>(); }

}  // namespace simt
