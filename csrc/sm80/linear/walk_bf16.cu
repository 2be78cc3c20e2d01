#include "sm80/linear/walk_launch.h"

namespace flash::sm80::linear {

void launch_walk_bf16(ForwardParams const& p, LaunchContext const& launch) {
  launch_any_walk<cutlass::bfloat16_t>(p, launch);
}

}  // namespace flash::sm80::linear
