// Types of one sm80 backward kernel: everything that follows from its row in the variant table.
#pragma once

#include <algorithm>

#include "params/scores.h"
#include "sm80/depth_split.h"
#include "sm80/tensor_core.h"

namespace flash::sm80 {

// The row warps of the grid of kWarps over (kRows, kColumns) whose warps read the fewest bytes a
// multiply-add: (rows + columns) of a warp's tile over their product.
template <int kRows, int kColumns, int kWarps>
constexpr int best_row_warps() {
  int best = 0, best_edges = 0;
  for (int row_warps = 1; row_warps <= kWarps; row_warps *= 2) {
    int const column_warps = kWarps / row_warps;
    if (kRows % (16 * row_warps) == 0 && kColumns % (16 * column_warps) == 0) {
      int const edges = kRows / row_warps + kColumns / column_warps;
      if (best == 0 || edges < best_edges) {
        best = row_warps;
        best_edges = edges;
      }
    }
  }
  return best;
}

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kKeyWarps_, int kStages_, ScoreLevel kScores_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of Q, K and their gradients
  static constexpr int kHeadDimV = kHeadDimV_;  // of V, O and their gradients
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kStages_;  // buffers for Q and dO
  static constexpr ScoreLevel kScores = kScores_;
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);

  // dK (kBlockN, kHeadDim) and dV (kBlockN, kHeadDimV): kKeyWarps warps along the keys,
  // kColumnWarps along the columns.
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kColumnWarps = kWarps / kKeyWarps;
  static_assert(kBlockN % (16 * kKeyWarps) == 0);
  static_assert(kHeadDim % (16 * kColumnWarps) == 0 && kHeadDimV % (16 * kColumnWarps) == 0);
  using KeyGrid = WarpGrid<Element, kKeyWarps, kColumnWarps>;

  // Sᵀ, dPᵀ (kBlockN, kBlockM): the same grid if each of its warps has 16 columns; otherwise warps
  // split the depth, and the first split goes on with the sums.
  static constexpr int kScoreWarps = std::min(kColumnWarps, kBlockM / 16);  // along the columns
  static constexpr int kDepthSplits = kColumnWarps / kScoreWarps;
  static constexpr int kThreadsOfSplit = kThreads / kDepthSplits;
  static constexpr int kDepth = kHeadDim / kDepthSplits, kDepthV = kHeadDimV / kDepthSplits;
  static constexpr int kScoreNumbers = kBlockN * kBlockM / kThreadsOfSplit;  // of a thread
  static_assert(kBlockM % (16 * kScoreWarps) == 0 && kDepthSplits * kScoreWarps == kColumnWarps);
  static_assert(kDepthSplits == 1 || (kDepth % 64 == 0 && kDepthV % 64 == 0),
                "whole runs of columns");
  using ScoreGrid = WarpGrid<Element, kKeyWarps, kScoreWarps>;
  // A warp that has all columns of its keys' Pᵀ and dSᵀ multiplies them from its registers; else
  // warps exchange them through shared memory.
  static constexpr bool kExchangeP = kColumnWarps > 1;

  // Sᵀ, dPᵀ and dQ are computed in passes over their columns, so that their accumulators fit beside
  // those of dK and dV.
  static constexpr int kScorePasses = ceil_div(kBlockN * kBlockM / kThreads, 32);
  static constexpr int kPassM = kBlockM / kScorePasses;
  static_assert(kDepthSplits == 1 || kScorePasses == 1);
  static constexpr int kQueryGradients = kBlockM * kHeadDim / kThreads;  // numbers of dQ, a thread
  static constexpr int kQueryPasses = ceil_div(kQueryGradients, 96);

  // dQ (kBlockM, kHeadDim / kQueryPasses)
  static constexpr int kRowWarps = best_row_warps<kBlockM, kHeadDim / kQueryPasses, kWarps>();
  static_assert(kRowWarps > 0);
  using RowGrid = WarpGrid<Element, kRowWarps, kWarps / kRowWarps>;
  // Finding where dQ's operands are read anew in each step takes 1 to 4% more instructions, and
  // pays where it saves 276 bytes of spills (docs/lab/sm80_operands.md).
  static constexpr bool kFindsOperandsAnew = kHeadDim == 192 && kHeadDimV == 192;
};

}  // namespace flash::sm80
