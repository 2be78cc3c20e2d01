#include "passes/largest/launch.h"

#include "launch/launch_kernel.h"
#include "passes/largest/kernel.h"

namespace flash {

void launch_largest(LargestParams const& params, LaunchContext const& launch) {
  launch_kernel<largest::largest_kernel>(
      launch, {params.heads, largest::kThreads, largest::kSmemBytes}, params);
}

}  // namespace flash
