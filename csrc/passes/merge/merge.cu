#include <cutlass/numeric_types.h>

#include <string_view>

#include "launch/launch_kernel.h"
#include "passes/merge/kernel.h"

namespace flash {
namespace {

template <class Out, class A, class B>
void launch_for(MergeParams const& p, LaunchContext const& launch) {
  launch_kernel<merge::merge_kernel<Out, A, B>>(launch, {merge::num_blocks(p), merge::kThreads, 0},
                                                p);
}

template <class Element>
void launch_of(MergeParams const& p, MergeWidths wide, LaunchContext const& launch) {
  auto const to_narrow =
      wide.out_a ? launch_for<Element, float, Element> : launch_for<Element, Element, Element>;
  auto const to_wide =
      wide.out_a ? launch_for<float, float, Element> : launch_for<float, Element, Element>;
  (wide.out ? to_wide : to_narrow)(p, launch);
}

}  // namespace

void launch_merge(MergeParams const& params, char const* dtype, MergeWidths wide,
                  LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? launch_of<cutlass::bfloat16_t>
                                                           : launch_of<cutlass::half_t>;
  launch_it(params, wide, launch);
}

}  // namespace flash
