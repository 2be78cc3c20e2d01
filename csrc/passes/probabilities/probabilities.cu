#include "passes/probabilities/launch.h"

#include <string_view>

#include "launch/launch_kernel.h"
#include "passes/probabilities/kernel.h"

namespace flash {
namespace {

template <class Element>
void launch_for(FwdParams const& p, void* s_dmask, LaunchContext const& launch) {
  launch_kernel<probabilities::probabilities_kernel<Element>>(
      launch, {probabilities::num_blocks(p), probabilities::kThreads, 0}, p,
      static_cast<Element*>(s_dmask));
}

}  // namespace

void launch_probabilities(FwdParams const& params, char const* dtype, void* s_dmask,
                          LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? launch_for<cutlass::bfloat16_t>
                                                           : launch_for<cutlass::half_t>;
  launch_it(params, s_dmask, launch);
}

}  // namespace flash
