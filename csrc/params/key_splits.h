#pragma once

#include "params/fast_div.h"
#include "params/tensor_view.h"

namespace flash {

constexpr int kMostSplitsAtOnce = 16;  // one of the merging kernels has registers for so many

// Up to so many rows, the merge loads all splits of a row at once: it waits once, instead of once
// for the LSE and once for each four splits. On an H200, 256 rows and 16 splits: -6.4% of the call.
// But it takes the registers of 16 splits, with which 4,096 rows took 4 µs more.
constexpr int kMostRowsAtOnce = 512;

constexpr bool merges_at_once(int64_t rows, int splits) {
  return rows <= kMostRowsAtOnce && splits <= kMostSplitsAtOnce;
}

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
