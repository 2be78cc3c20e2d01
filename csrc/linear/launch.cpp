#include "linear/launch.h"

#include <string_view>

namespace flash {

namespace sm80::linear {
void launch_forward_bf16(flash::linear::ForwardParams const&, LaunchContext const&);
void launch_forward_fp16(flash::linear::ForwardParams const&, LaunchContext const&);
}  // namespace sm80::linear

namespace linear {

void launch_forward(ForwardParams const& p, char const* dtype, LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? sm80::linear::launch_forward_bf16
                                                           : sm80::linear::launch_forward_fp16;
  launch_it(p, launch);
}

}  // namespace linear
}  // namespace flash
