#pragma once

#include "params/fast_div.h"
#include "params/tensor_view.h"

namespace flash {

constexpr int kMostSplitsAtOnce = 16;  // that one merging kernel has registers for

// A forward whose row blocks are cut along the keys, because they are too few to fill the GPU. Each
// part has a result of its own, which lies in the workspace until all of a row's are merged.
struct KeySplits {
  FastDiv count;          // parts of a row block; 1: whole
  TensorView<float> out;  // [b, s, h, dv], of the first part; normalised
  RowView lse;            // [b, h, s]
  int64_t out_apart = 0;  // from a part to the next
  int64_t lse_apart = 0;
};

}  // namespace flash
