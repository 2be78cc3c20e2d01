// One token of each sequence through the gated delta rule, its state in memory: what the kernel is
// given.
#pragma once

#include "linear/step.h"

namespace flash::linear {

struct DeltaStepParams {
  StepParams step;   // its gate is one number a head
  StepGate beta;     // [b, h]; ptr null: ones
  float of_sigmoid;  // beta = of_sigmoid · sigmoid(given); 0: beta is as given
  bool normalizes;   // q and k are divided by their norms
};

// A thread keeps its part of the state, of one size, from the read to the write, so there is a
// largest K: that of all groups of a tile.
constexpr int kDeltaStepK = 256;

// dtype: of q, "bf16", "fp16" or "fp32".
void launch_delta_step(DeltaStepParams const& p, char const* dtype, LaunchContext const& launch);

}  // namespace flash::linear
