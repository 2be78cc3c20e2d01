#include "sm80/linear/forward.h"

namespace flash::sm80::linear {

void launch_forward_bf16(ForwardParams const& p, LaunchContext const& launch) {
  launch_any<cutlass::bfloat16_t>(p, launch);
}

void launch_states_bf16(ForwardParams const& p, LaunchContext const& launch) {
  launch_any_states<cutlass::bfloat16_t>(p, launch);
}

}  // namespace flash::sm80::linear
