#pragma once

#include "launch/variant.h"
#include "params/largest_params.h"

namespace flash {

// Writes each head's largest logit; -inf without rows.
void launch_largest(LargestParams const& params, LaunchContext const& launch);

}  // namespace flash
