// Each head's largest logit before a forward, whose epilogues raise it; included by the generated
// files only.
#pragma once

#include <cmath>

#include "core/early_launch.h"
#include "launch/launch_kernel.h"

namespace flash {

constexpr int kMaxLogitsThreads = 128;

// One CTA. logits: [heads]. Config: of the forward that follows, so that this has code for the same
// GPUs; what portable code lacks is in core/early_launch.h.
template <class Config>
__global__ void __launch_bounds__(kMaxLogitsThreads)
    start_max_logits_kernel(float* logits, int heads) {
  let_next_launch_start();
  for (int head = threadIdx.x; head < heads; head += kMaxLogitsThreads) {
    logits[head] = -INFINITY;
  }
}

// Before a launch of Config's forward: -inf for each head, if the call asks for their largest
// logits. It lets an early launch start at once.
template <class Config>
void start_max_logits(FwdParams const& params, LaunchContext const& launch) {
  if (params.max_logits.of_heads) {
    launch_kernel<start_max_logits_kernel<Config>>(launch, {1, kMaxLogitsThreads, 0},
                                                   params.max_logits.of_heads, params.heads_q);
  }
}

}  // namespace flash
