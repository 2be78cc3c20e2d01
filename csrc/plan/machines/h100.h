// One NVIDIA H100 (80 GB HBM3, 700 W).
#pragma once

#include "plan/machines/hopper.h"
#include "plan/machines/hopper_decode.h"
#include "plan/machines/hopper_forward.h"

namespace flash::plan {

inline constexpr Machine kH100 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 50 << 20,
    .smem_per_block = 232448,
    .memory = 2.8e6f,
    .reads = 3.15e6f,
    .sm_reads = 57e3f,
    .l2_gain = 1.9f,
    .launch = 7.f,
    .l2_share = 1.2f,
    .mma_flops = 2.4e6f,
    .backward = kHopperBackward,
    .forward = kHopperForward,
    .decode = kHopperDecode,
};

}  // namespace flash::plan
