// Types of one sm80 forward kernel: everything that follows from its row in the variant table.
#pragma once

#include <algorithm>

#include "params/scores.h"
#include "sm80/depth_split.h"
#include "sm80/tensor_core.h"

namespace flash::sm80 {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          ScoreLevel kScores_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q and K
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr ScoreLevel kScores = kScores_;
  static constexpr bool kPaged = false;
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

  // Warps beyond those that the rows need share rows. 512 columns of O would take all registers of
  // a thread, so each warp has some columns of V and O, and of Q·Kᵀ some of the depth.
  static constexpr int kRowWarps = std::min(kWarps, kBlockM / 16);
  static constexpr int kDepthSplits = kWarps / kRowWarps;
  static constexpr int kDepth = kHeadDim / kDepthSplits;
  static constexpr int kColumns = kHeadDimV / kDepthSplits;
  static constexpr int kThreadsOfSplit = kRowWarps * 32;
  static constexpr int kScoreNumbers = kBlockM * kBlockN / kThreadsOfSplit;  // of a thread
  static_assert(kBlockM % (16 * kRowWarps) == 0 && kBlockN % 16 == 0);
  static_assert(kRowWarps * kDepthSplits == kWarps && kDepthSplits <= 2);
  static_assert(kDepthSplits == 1 || (kDepth % 64 == 0 && kColumns % 64 == 0),
                "whole runs of columns");

  using Grid = WarpGrid<Element, kRowWarps>;
};

// For keys in pages. These kernels have rows of their own in the variant table, because a look-up
// beside the plain loads costs registers that the other kernels do not have.
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps,
          ScoreLevel kScores>
struct PagedConfig
    : ForwardConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, kScores> {
  static constexpr bool kPaged = true;
};

}  // namespace flash::sm80
