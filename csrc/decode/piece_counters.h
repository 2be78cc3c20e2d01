// The counters by which the CTAs of a launch find out which of them merges.
#pragma once

#include "core/piece_schedule.h"
#include "launch/counters.h"
#include "launch/launch_kernel.h"

namespace flash::decode {

constexpr int kPieceCounters = 1 << 16;
__device__ static uint32_t piece_counters[kPieceCounters];

// The counters of this file's kernels; `static`, as the array is.
static inline Counters& counters() {
  static Counters own(piece_counters);
  return own;
}

// The call with counters that are zero, if its keys are cut. `static`, as those of the file are.
static inline DecodeParams with_counters(DecodeParams const& params, LaunchContext const& launch) {
  DecodeParams counted = params;
  int64_t const pieces = num_pieces(params.schedule);
  if (params.counters) {
    FLASH_CHECK_CUDA(cudaMemsetAsync(params.counters, 0, pieces * sizeof(uint32_t), launch.stream),
                     launch.name);
  } else if (params.schedule.max_pieces > 1) {
    counted.counters = counters().of(Counting::Pieces, pieces, launch);
  }
  return counted;
}

}  // namespace flash::decode
