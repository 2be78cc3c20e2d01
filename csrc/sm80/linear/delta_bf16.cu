#include "sm80/linear/delta_launch.h"

namespace flash::sm80::linear {

void launch_delta_bf16(DeltaParams const& p, LaunchContext const& launch) {
  launch_any_delta<cutlass::bfloat16_t>(p, launch);
}

}  // namespace flash::sm80::linear
