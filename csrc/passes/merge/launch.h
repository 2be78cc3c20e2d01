#pragma once

#include "launch/variant.h"
#include "params/merge_params.h"

namespace flash {

// Which of the two outputs are fp32, instead of what out_b is.
struct MergeWidths {
  bool out;
  bool out_a;
};

// dtype: that of out_b, "bf16" or "fp16".
void launch_merge(MergeParams const& params, char const* dtype, MergeWidths wide,
                  LaunchContext const& launch);

}  // namespace flash
