#include <cutlass/numeric_types.h>

#include <string_view>

#include "host/launch_kernel.h"
#include "merge/kernel.h"
#include "merge/launch.h"

namespace flash {
namespace {

template <class Wide, class Element>
void launch_for(MergeParams const& p, LaunchContext const& launch) {
  launch_kernel<merge::merge_kernel<Wide, Element>>(launch,
                                                    {merge::num_blocks(p), merge::kThreads, 0}, p);
}

template <class Element>
void launch_of(MergeParams const& p, bool wide, LaunchContext const& launch) {
  (wide ? launch_for<float, Element> : launch_for<Element, Element>)(p, launch);
}

}  // namespace

void launch_merge(MergeParams const& params, char const* dtype, bool wide,
                  LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? launch_of<cutlass::bfloat16_t>
                                                           : launch_of<cutlass::half_t>;
  launch_it(params, wide, launch);
}

}  // namespace flash
