// Stands in for CUTLASS's header: what is not here is not emulated, and does not compile.
#pragma once

#include <cutlass/arch/config.h>
#include <cutlass/arch/memory_sm75.h>
#include <cute/arch/cluster_sm90.hpp>

#include "hopper/barriers.h"
#include "hopper/cluster.h"

namespace cutlass::arch {

enum class ReservedNamedBarriers {
  EpilogueBarrier = 1,
  TransposeBarrier = 2,
  TransformBarrier = 3,
  StreamkBarrier0 = 4,
  StreamkBarrier1 = 5,
  TmemAllocBarrier = 6,
  Sm120MainloopBarrier = 7,
  FirstUserBarrier = 8,
};

class NamedBarrier {
 public:
  static constexpr uint32_t ReservedNamedBarrierCount = 8;
  static constexpr uint32_t HardwareMaxNumNamedBarriers = 16;

  NamedBarrier(uint32_t num_threads, ReservedNamedBarriers reserved)
      : num_threads_(num_threads), id_(static_cast<uint32_t>(reserved)) {}
  explicit NamedBarrier(uint32_t num_threads, uint32_t id = 0)
      : num_threads_(num_threads), id_(id + ReservedNamedBarrierCount) {}

  void arrive() const { simt::named_barriers().arrive(id_, num_threads_); }
  void arrive_and_wait() const { simt::named_barriers().arrive_and_wait(id_, num_threads_); }
  void sync() const { arrive_and_wait(); }

  // Users' ids come after the reserved ones.
  template <class Id>
  static void arrive(uint32_t num_threads, Id id) {
    simt::named_barriers().arrive(number(id), num_threads);
  }
  template <class Id>
  static void arrive_and_wait(uint32_t num_threads, Id id) {
    simt::named_barriers().arrive_and_wait(number(id), num_threads);
  }
  template <class Id>
  static void sync(uint32_t num_threads, Id id) {
    arrive_and_wait(num_threads, id);
  }

 private:
  static uint32_t number(ReservedNamedBarriers id) { return static_cast<uint32_t>(id); }
  static uint32_t number(uint32_t id) { return id + ReservedNamedBarrierCount; }

  uint32_t num_threads_;
  uint32_t id_;
};

struct ClusterBarrier {
  using ValueType = uint64_t;

  ClusterBarrier() = delete;

  void init(uint32_t count) const { init(&barrier_, count); }
  void arrive() const { arrive(&barrier_); }
  void arrive(uint32_t block, uint32_t really = true) const { arrive(&barrier_, block, really); }
  void wait(uint32_t parity) const { wait(&barrier_, parity); }
  bool try_wait(uint32_t parity) const { return try_wait(&barrier_, parity); }
  bool test_wait(uint32_t parity, uint32_t really = true) const {
    return test_wait(&barrier_, parity, really);
  }

  static void init(ValueType const* barrier, uint32_t count) {
    simt::mbarriers().init(simt::smem_address(barrier), count);
  }
  static void invalidate(ValueType const* barrier) {
    simt::mbarriers().invalidate(simt::smem_address(barrier));
  }
  static void arrive(ValueType const* barrier) {
    simt::mbarriers().arrive(simt::smem_address(barrier));
  }
  // Arrives at the mbarrier at the same place in another block.
  static void arrive(ValueType const* barrier, uint32_t block, uint32_t really) {
    uint32_t const address = simt::smem_address(barrier);
    if (really) {
      simt::InBlock const there(block);
      simt::mbarriers().arrive(address);
    }
  }
  static void wait(ValueType const* barrier, uint32_t parity) {
    simt::wait_for(simt::PhaseEnd(barrier, parity));
  }
  static bool try_wait(ValueType const* barrier, uint32_t parity) {
    return simt::phase_has_ended(barrier, parity);
  }
  static bool test_wait(ValueType const* barrier, uint32_t parity, uint32_t really) {
    return really && simt::phase_has_ended(barrier, parity);
  }

 protected:
  ValueType barrier_;
};

struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(uint32_t bytes) const { arrive_and_expect_tx(&barrier_, bytes); }
  void arrive_and_expect_tx(uint32_t bytes, uint32_t block, uint32_t really = 1) const {
    arrive_and_expect_tx(&barrier_, bytes, block, really);
  }
  void expect_transaction(uint32_t bytes) const { expect_transaction(&barrier_, bytes); }
  void complete_transaction(uint32_t bytes, uint32_t really = 1) const {
    complete_transaction(&barrier_, cute::block_rank_in_cluster(), bytes, really);
  }
  void complete_transaction(uint32_t block, uint32_t bytes, uint32_t really) const {
    complete_transaction(&barrier_, block, bytes, really);
  }

  static void arrive_and_expect_tx(ValueType const* barrier, uint32_t bytes) {
    expect_transaction(barrier, bytes);
    arrive(barrier);
  }
  static void arrive_and_expect_tx(ValueType const* barrier, uint32_t bytes, uint32_t block,
                                   uint32_t really) {
    uint32_t const address = simt::smem_address(barrier);
    if (really) {
      simt::InBlock const there(block);
      simt::mbarriers().add_bytes(address, bytes);
      simt::mbarriers().arrive(address);
    }
  }
  static void expect_transaction(ValueType const* barrier, uint32_t bytes) {
    simt::mbarriers().add_bytes(simt::smem_address(barrier), bytes);
  }
  static void complete_transaction(ValueType const* barrier, uint32_t block, uint32_t bytes,
                                   uint32_t really = 1) {
    uint32_t const address = simt::smem_address(barrier);
    if (really) {
      simt::InBlock const there(block);
      simt::mbarriers().add_bytes(address, -int64_t{bytes});
    }
  }
};

// Threads switch only where they wait, so a barrier that is initialised is so for all of a block.
inline void fence_barrier_init() { simt::mbarriers().fence_init(); }

inline void fence_view_async_shared() { simt::fence_proxy_async(); }

}  // namespace cutlass::arch
