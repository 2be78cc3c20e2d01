// What a forward kernel's epilogues raise to each head's largest logit.
#pragma once

#include <cmath>

#include "core/launch_order.h"

namespace flash::largest {

constexpr int kThreads = 128;

// One CTA. logits: [heads]. Config: of the forward that follows, so that this has code for the same
// GPUs; what portable code lacks is in core/launch_order.h.
template <class Config>
__global__ void __launch_bounds__(kThreads) start_kernel(float* logits, int heads) {
  let_next_launch_start();
  for (int head = threadIdx.x; head < heads; head += kThreads) {
    logits[head] = -INFINITY;
  }
}

}  // namespace flash::largest
