#include "sm80/linear/delta_launch.h"

namespace flash::sm80::linear {

void launch_delta_fp16(DeltaParams const& p, LaunchContext const& launch) {
  launch_any_delta<cutlass::half_t>(p, launch);
}

}  // namespace flash::sm80::linear
