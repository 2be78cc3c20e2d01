// Times of Hopper's backward kernels: an H100 and an H200 are the same processor with other memory.
#pragma once

#include "plan/machine.h"
#include "plan/machines/hopper_decode.h"
#include "plan/machines/hopper_forward.h"

namespace flash::plan {

inline constexpr BackwardTimes kHopperBackward[] = {
    {64, 64, {3.4f, 2.26f}, {3.6f, 2.55f}, {5.9f, 2.33f}},
    {96, 96, {1.7f, 1.72f}, {4.4f, 2.46f}, {4.6f, 1.81f}},
    {128, 128, {2.6f, 2.08f}, {3.4f, 2.48f}, {4.7f, 2.15f}},
    {192, 128, {0.7f, 1.66f}, {3.6f, 2.09f}, {3.7f, 1.70f}},
    {192, 192, {2.1f, 1.70f}, {3.9f, 1.86f}, {6.1f, 1.59f}},
    {256, 256, {3.9f, 2.10f}, {3.7f, 2.86f}, {10.2f, 2.19f}},
};

// l2_share: the bytes that can be counted on to be in L2 again, over its size.
constexpr Machine hopper(int64_t l2_bytes, float memory, float reads, float l2_share) {
  return {
      .sm = 90,
      .sm_count = 132,
      .l2_bytes = l2_bytes,
      .smem_per_block = 232448,
      .memory = memory,
      .reads = reads,
      .sm_reads = 57e3f,
      .l2_gain = 1.9f,
      .launch = 7.f,
      .l2_share = l2_share,
      .mma_flops = 2.4e6f,
      .backward = kHopperBackward,
      .forward = kHopperForward,
      .decode = kHopperDecode,
  };
}

}  // namespace flash::plan
