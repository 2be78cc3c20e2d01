// The plans of a thread's last calls: planning takes microseconds, and calls repeat.
#pragma once

#include <array>

#include "launch/variant.h"
#include "plan/problem.h"

namespace flash {

template <class Plan>
class PlanCache {
 public:
  // make(): the plan of a problem that is not in the cache.
  template <class Make>
  Plan const& of(plan::Problem const& problem, Variant const& variant, DeviceInfo const& device,
                 Make make) {
    Entry& entry = entries_[slot(problem, device)];
    bool const same =
        entry.variant == &variant && entry.device == device && entry.problem == problem;
    if (!same) {
      entry = {&variant, device, problem, make()};
    }
    return entry.plan;
  }

 private:
  struct Entry {
    Variant const* variant = nullptr;
    DeviceInfo device{};
    plan::Problem problem{};
    Plan plan{};
  };

  static constexpr int kEntriesLog2 = 6;

  // Hashes the numbers in which a model's calls differ most. Problems that differ elsewhere share
  // an entry, and replace each other.
  static uint64_t slot(plan::Problem const& p, DeviceInfo const& device) {
    uint64_t hash = 0;
    for (int64_t const number :
         {int64_t(p.batch), int64_t(p.seqlen_q), int64_t(p.seqlen_k), p.total_q, p.total_k,
          int64_t(p.heads_q), int64_t(p.heads_kv), int64_t(p.mask.left), int64_t(p.mask.right),
          int64_t(device.sm_count)}) {
      hash = (hash ^ uint64_t(number)) * 0x9e3779b97f4a7c15;
    }
    return hash >> (64 - kEntriesLog2);
  }

  std::array<Entry, 1 << kEntriesLog2> entries_{};
};

}  // namespace flash
