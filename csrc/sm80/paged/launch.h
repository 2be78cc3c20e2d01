// The forward kernel for keys in pages; included by the generated files only. It has rows of its
// own in the variant table, because a look-up beside the plain loads costs registers that the other
// kernels do not have.
#pragma once

#include "sm80/forward/launch.h"

namespace flash::sm80 {

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps,
          ScoreLevel kScores>
struct PagedConfig
    : ForwardConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, kScores> {
  static constexpr bool kPaged = true;
};

template <class Config>
void launch_paged(FwdParams const& params, LaunchContext const& launch) {
  launch_forward<Config>(params, launch);
}

}  // namespace flash::sm80
