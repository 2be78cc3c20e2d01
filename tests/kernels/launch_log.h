// Launches that are noted down instead of being made, for tests of their order: any number of
// threads may launch then, while what runs kernels here is one thread's.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace flash {

class LaunchLog {
 public:
  using Entry = std::pair<uint64_t, bool>;  // Python's number of the thread; an early launch?

  // Whether it was noted down. Others get the time to come before the thread's next launch.
  bool takes(bool early) {
    if (!noting_) {
      return false;
    }
    {
      std::lock_guard const lock(mutex_);
      entries_.emplace_back(static_cast<uint64_t>(pthread_self()), early);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    return true;
  }

  void begin() { noting_ = true; }

  std::vector<Entry> end() {
    noting_ = false;
    return std::exchange(entries_, {});
  }

 private:
  std::atomic<bool> noting_ = false;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

inline LaunchLog launch_log;

}  // namespace flash
