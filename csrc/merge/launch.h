#pragma once

#include "host/variant.h"
#include "params/merge_params.h"

namespace flash {

// dtype: that of out_b, "bf16" or "fp16"; out_a has it too, or is fp32.
void launch_merge(MergeParams const& params, char const* dtype, bool wide,
                  LaunchContext const& launch);

}  // namespace flash
