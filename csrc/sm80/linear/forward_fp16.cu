#include "sm80/linear/forward.h"

namespace flash::sm80::linear {

void launch_forward_fp16(ForwardParams const& p, LaunchContext const& launch) {
  launch_any<cutlass::half_t>(p, launch);
}

void launch_states_fp16(ForwardParams const& p, LaunchContext const& launch) {
  launch_any_states<cutlass::half_t>(p, launch);
}

}  // namespace flash::sm80::linear
