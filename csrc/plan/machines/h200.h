// One NVIDIA H200 (141 GB, 700 W).
#pragma once

#include "plan/machines/hopper.h"

namespace flash::plan {

inline constexpr Machine kH200 =
    hopper(/*l2_bytes=*/60 << 20, /*memory=*/3.9e6f, /*reads=*/4.6e6f, /*l2_share=*/1.15f);

}  // namespace flash::plan
