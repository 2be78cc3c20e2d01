// Keeps the launches of a call together on their stream, because some of them overlap.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <mutex>

namespace flash {

// A call holds it from its first launch to its last: rule 3 of docs/kernels/counters.md.
//
// A call takes it when all its memory is allocated. While a thread holds it, it looks up counters
// and launches, and does nothing else: the allocator, torch's dispatcher and a listener to launches
// may wait for Python's interpreter, which a thread that waits for this lock may have.
class StreamLock {
 public:
  explicit StreamLock(cudaStream_t stream) : stream_(stream), lock_(mutex_of(stream)) {}

  cudaStream_t stream() const { return stream_; }

 private:
  // Streams that share a mutex now and then wait for each other's launches, a few microseconds.
  static std::mutex& mutex_of(cudaStream_t stream) {
    constexpr int kBits = 6, kCacheLine = 64;
    struct alignas(kCacheLine) Slot {
      std::mutex mutex;
    };
    static constinit std::array<Slot, 1 << kBits> slots{};
    // The golden ratio's multiples are spread evenly, whatever the handles' distances are.
    uint64_t const spread = uint64_t{reinterpret_cast<uintptr_t>(stream)} * 0x9e3779b97f4a7c15u;
    return slots[spread >> (64 - kBits)].mutex;
  }

  cudaStream_t stream_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace flash
