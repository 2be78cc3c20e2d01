#pragma once

#include "params/fast_div.h"
#include "params/tensor_view.h"

namespace flash {

constexpr int kMostSplitsAtOnce = 16;  // one of the merging kernels has registers for so many

// KV splits of a forward: its row blocks are cut along the keys, because they are too few to fill
// the GPU. Each split has a result of its own, which lies in the workspace until the results of a
// row are merged.
struct KeySplits {
  FastDiv count;          // splits of a row block; 1: whole
  TensorView<float> out;  // [b, s, h, dv], of the first split; normalised
  RowView lse;            // [b, h, s]
  int64_t out_apart = 0;  // from a split to the next
  int64_t lse_apart = 0;
};

}  // namespace flash
