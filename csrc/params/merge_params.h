#pragma once

#include "params/tensor_view.h"

namespace flash {

// Two results of attention over disjoint keys; the second is merged into the first. Element types
// are erased here.
struct MergeParams {
  TensorView<const void> out_a;  // [b, rows, h, dv]
  TensorView<const void> out_b;  // [b, rows, h, dv]
  TensorView<void> out;          // [b, rows, h, dv]; may be out_a
  RowView lse_a;                 // [b, h, rows], natural log, read and written
  RowView lse_b;
  int batch;
  int rows;
  int heads;
  int head_dim_v;  // a multiple of 8
};

}  // namespace flash
