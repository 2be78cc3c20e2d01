// One NVIDIA H200 (141 GB, 700 W).
#pragma once

#include "plan/machines/hopper.h"
#include "plan/machines/hopper_decode.h"
#include "plan/machines/hopper_forward.h"

namespace flash::plan {

inline constexpr Machine kH200 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 60 << 20,
    .smem_per_block = 232448,
    .memory = 3.9e6f,
    .reads = 4.6e6f,
    .sm_reads = 57e3f,
    .l2_gain = 1.9f,
    .launch = 7.f,
    .l2_share = 1.15f,
    .mma_flops = 2.4e6f,
    .backward = kHopperBackward,
    .forward = kHopperForward,
    .decode = kHopperDecode,
};

}  // namespace flash::plan
