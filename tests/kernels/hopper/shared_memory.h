// Shared memory as Hopper's asynchronous units see it: 32-bit addresses, and a view of their own
// (the "async proxy") that ordinary stores reach only through fence.proxy.async.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "../simt.h"

namespace simt {

// Where a block's dynamic shared memory starts on the GPU; no valid address is 0.
constexpr uint32_t kSmemBegin = 1024;

inline uint32_t smem_address(void const* pointer) {
  auto const offset = static_cast<char const*>(pointer) - block->smem;
  expect(offset >= 0 && offset < block->smem_bytes, "an address is not in shared memory");
  return kSmemBegin + static_cast<uint32_t>(offset);
}

inline char* smem_pointer(uint32_t address, int bytes = 1) {
  expect(address >= kSmemBegin && address + bytes <= kSmemBegin + block->smem_bytes, Hex{address},
         " + ", bytes, " is not in shared memory");
  return block->smem + (address - kSmemBegin);
}

// What asynchronous units see. Ordinary stores are noticed by comparing, so that one that changes
// nothing needs no fence here.
struct AsyncView : Unit {
  std::vector<char> bytes;

  AsyncView() : bytes(block->smem_bytes) {
    auto* const words = reinterpret_cast<uint16_t*>(bytes.data());
    std::fill(words, words + bytes.size() / 2, kPoison);
  }

  // fence.proxy.async. On a GPU it concerns one thread, here all of them: a thread that forgets it
  // is found only if no thread fences.
  void fence() { std::memcpy(bytes.data(), block->smem, bytes.size()); }

  bool sees(uint32_t address, int count) const {
    char const* const real = smem_pointer(address, count);
    return std::memcmp(real, bytes.data() + (real - block->smem), count) == 0;
  }

  // An asynchronous unit writes.
  void write(uint32_t address, void const* from, int count) {
    char* const real = smem_pointer(address, count);
    std::memcpy(real, from, count);
    std::memcpy(bytes.data() + (real - block->smem), from, count);
  }

  // What an asynchronous unit is going to write is NaN until it does.
  void poison(uint32_t address, int count) {
    constexpr std::array<uint16_t, 128> kNan = [] {
      std::array<uint16_t, 128> nan;
      nan.fill(kPoison);
      return nan;
    }();
    constexpr int kStep = sizeof(kNan);
    for (int byte = 0; byte < count; byte += kStep) {
      write(address + byte, kNan.data(), std::min(count - byte, kStep));
    }
  }
};

inline AsyncView& async_view() { return block->unit<AsyncView>(); }

inline void fence_proxy_async() { async_view().fence(); }

inline void expect_fenced(uint32_t address, int bytes, char const* reader) {
  expect(async_view().sees(address, bytes), reader, " at ", Hex{address},
         " meets ordinary stores with no fence.proxy.async in between");
}

}  // namespace simt
