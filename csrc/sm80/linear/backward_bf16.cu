#include "sm80/linear/backward.h"

namespace flash::sm80::linear {

void launch_gradients_bf16(BackwardParams const& p, LaunchContext const& launch) {
  launch_any_gradients<cutlass::bfloat16_t>(p, launch);
}

}  // namespace flash::sm80::linear
