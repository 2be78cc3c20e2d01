#pragma once

#include <cutlass/arch/barrier.h>

#include "sm90/forward/config.h"

namespace flash::sm90::forward {

// Ping-pong barriers: warpgroups start products alternately, so that one's softmax runs under
// another's products and not all of them want the same unit at once.
template <class Config>
struct PingPong {
  int warpgroup;

  // Called before the first products, which are the first warpgroup's.
  __device__ void begin() const {
    if (warpgroup == Config::kConsumers - 1) {
      pass();
    }
  }
  __device__ void wait() const { cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup); }
  __device__ void pass() const {
    int const next = warpgroup + 1 < Config::kConsumers ? warpgroup + 1 : 0;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, next);
  }
  // Called after the last products, so that no barrier is left half full.
  __device__ void end() const {
    if (warpgroup == 0) {
      wait();
    }
  }
};

}  // namespace flash::sm90::forward
