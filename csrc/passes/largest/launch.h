// Included by the generated files only.
#pragma once

#include "launch/launch_kernel.h"
#include "params/fwd_params.h"
#include "passes/largest/kernel.h"

namespace flash {

// Before a launch of Config's forward: -inf for each head, if the call asks for their largest
// logits. It lets an early launch start at once.
template <class Config>
void start_max_logits(FwdParams const& params, LaunchContext const& launch) {
  if (params.max_logits.of_heads) {
    launch_kernel<largest::start_kernel<Config>>(launch, {1, largest::kThreads, 0},
                                                 params.max_logits.of_heads, params.heads_q);
  }
}

}  // namespace flash
