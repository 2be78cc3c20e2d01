// Ranges of zeroed counters, carved from slabs, and their owners.
#pragma once

#include <algorithm>
#include <bit>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace flash {

// What counts: launches of one kind on one stream never count at the same time.
enum class Counting { Tiles, Pieces };

// Launches that run one after the other, whatever else runs.
struct CounterOwner {
  int device;
  unsigned long long capture;  // 0: none; its graph may be replayed beside anything but itself
  unsigned long long stream;
  Counting what;

  auto operator<=>(CounterOwner const&) const = default;
};

// Counters that are zero and have no owner yet.
struct CounterSlab {
  uint32_t* begin = nullptr;
  int64_t size = 0;
};

// An owner keeps its range for the life of the process, or until it asks for a larger one. Threads
// may ask at the same time.
class CounterArena {
 public:
  // Slabs of the current device: the first one, and others of so many counters.
  using First = std::function<CounterSlab()>;
  using Another = std::function<CounterSlab(int64_t count)>;

  CounterArena(First first, Another another)
      : first_(std::move(first)), another_(std::move(another)) {}

  // At least `count` counters, zero if every launch before has left them so. On owner.device, which
  // is the current one.
  uint32_t* range(CounterOwner const& owner, int64_t count) {
    std::lock_guard const lock(mutex_);
    CounterSlab& range = ranges_[owner];
    if (range.size < count) {
      // Twice as large each time: what an owner leaves behind is less than what it has.
      int64_t const size = std::max<int64_t>(kLeast, std::bit_ceil(static_cast<uint64_t>(count)));
      range = {carve(owner.device, size), size};
    }
    return range.begin;
  }

 private:
  static constexpr int64_t kLeast = 8;          // 32 bytes, which memory moves at a time
  static constexpr int64_t kAnother = 1 << 14;  // 64 KiB

  uint32_t* carve(int device, int64_t size) {
    if (!left_.contains(device)) {
      left_.emplace(device, first_());
    }
    CounterSlab& left = left_[device];
    if (left.size >= size) {
      return cut(left, size);
    }
    CounterSlab slab = another_(std::max(size, kAnother));
    uint32_t* const begin = cut(slab, size);
    if (slab.size > left.size) {
      left = slab;
    }
    return begin;
  }

  static uint32_t* cut(CounterSlab& slab, int64_t size) {
    slab.size -= size;
    return std::exchange(slab.begin, slab.begin + size);
  }

  First first_;
  Another another_;
  std::mutex mutex_;
  std::map<CounterOwner, CounterSlab> ranges_;
  std::map<int, CounterSlab> left_;  // of a slab, on each device
};

}  // namespace flash
