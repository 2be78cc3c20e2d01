#pragma once

#include "launch/variant.h"
#include "params/rotary_params.h"

namespace flash {

// dtype: that of x, "bf16", "fp16" or "fp32".
void launch_rotary(RotaryParams const& params, char const* dtype, LaunchContext const& launch);

}  // namespace flash
