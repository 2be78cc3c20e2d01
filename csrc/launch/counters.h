// Counters in device memory that kernels leave at 0. See docs/kernels/counters.md.
#pragma once

#include "launch/counter_arena.h"
#include "launch/variant.h"

namespace flash {

// The counters of kernels that are compiled together. Never destroyed: threads may launch until the
// process ends.
class Counters {
 public:
  // symbol: a `__device__` array of the kernels' own file, which they have first.
  explicit Counters(void const* symbol);

  // As many as the launch needs. No launch that could run beside it has any of them.
  uint32_t* of(Counting what, int64_t count, LaunchContext const& launch);

 private:
  CounterArena& arena_;
};

}  // namespace flash
