// What measures each choice of a plan sets these (`python -m benchmarks regret`).
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace flash {

// The backward of each GPU has a thread of its own.
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

inline std::atomic<int> forced_choice = -1;  // of a call's choices; -1: the one that is planned
inline std::atomic<bool> records_plans = false;
inline RecordedPlan recorded_plan;  // of the last call, as JSON (host/plan_text.h)

}  // namespace flash
