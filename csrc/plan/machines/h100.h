// One NVIDIA H100 (80 GB HBM3, 700 W).
#pragma once

#include "plan/machines/hopper.h"

namespace flash::plan {

inline constexpr Machine kH100 =
    hopper(/*l2_bytes=*/50 << 20, /*memory=*/2.8e6f, /*reads=*/3.15e6f, /*l2_share=*/1.2f);

}  // namespace flash::plan
