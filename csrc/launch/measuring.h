// Switches by which `python -m benchmarks regret` forces and records the choices of plans.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch/error.h"

namespace flash {

// Guarded by a mutex, because the backward of each GPU runs in a thread of its own.
class RecordedPlan {
 public:
  void put(std::string text) {
    std::lock_guard const lock(mutex_);
    text_ = std::move(text);
  }

  std::string take() {
    std::lock_guard const lock(mutex_);
    return std::exchange(text_, {});
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

constexpr int kPlanned = -1;     // not forced
constexpr int kNotDecoded = -2;  // the forward kernel serves all

inline std::atomic<int> forced_choice = kPlanned;  // index of a forward's or a backward's choice
inline std::atomic<int> forced_decode = kPlanned;  // index of the decode kernel's choice
inline std::atomic<bool> records_plans = false;
// The plans of the last call, as JSON (launch/plan_text.h).
inline RecordedPlan recorded_plan, recorded_decode;

template <class Choice>
Choice const& forced(std::vector<Choice> const& all, int index) {
  int const count = static_cast<int>(all.size());
  check(index < count, "choice ", index, " is forced, of ", count);
  return all[index];
}

// Whether plans are recorded or forced, and so may not come from the cache (launch/plan_cache.h).
inline bool is_measuring() {
  return records_plans || forced_choice != kPlanned || forced_decode != kPlanned;
}

}  // namespace flash
