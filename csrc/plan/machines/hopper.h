// Times of Hopper's backward kernels: an H100 and an H200 are the same processor with other memory.
#pragma once

#include "plan/machine.h"
#include "plan/machines/hopper_decode.h"
#include "plan/machines/hopper_forward.h"

namespace flash::plan {

inline constexpr BackwardTimes kHopperBackward[] = {
    {64, 64, {8.10f, 2.046f}, {6.89f, 3.124f}, {8.52f, 2.062f}},
    {96, 96, {12.36f, 1.392f}, {2.00f, 2.986f}, {6.28f, 1.406f}},
    {128, 128, {11.50f, 1.870f}, {8.27f, 2.407f}, {5.67f, 1.959f}},
    {192, 128, {5.70f, 1.384f}, {0.01f, 2.724f}, {8.49f, 0.984f}},
    {192, 192, {9.47f, 1.477f}, {3.75f, 2.335f}, {7.36f, 1.483f}},
    {256, 256, {10.59f, 1.933f}, {4.34f, 4.173f}, {3.91f, 2.349f}},
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
