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

constexpr int kPlanned = -1;     // not forced
constexpr int kNotDecoded = -2;  // the forward kernel serves all

inline std::atomic<int> forced_choice = kPlanned;  // index, of a forward's or a backward's choices
inline std::atomic<int> forced_decode = kPlanned;  // of the decode kernel's
inline std::atomic<bool> records_plans = false;
// Of the last call, as JSON (host/plan_text.h).
inline RecordedPlan recorded_plan, recorded_decode;

// Whether plans are looked at or changed, and so may not come from those that were made before.
inline bool is_measuring() {
  return records_plans || forced_choice != kPlanned || forced_decode != kPlanned;
}

}  // namespace flash
