#pragma once

#include "launch/variant.h"

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

// Which of the two outputs are fp32, instead of what out_b is.
struct MergeWidths {
  bool out;
  bool out_a;
};

// dtype: of out_b, "bf16" or "fp16".
void launch_merge(MergeParams const& params, char const* dtype, MergeWidths wide,
                  LaunchContext const& launch);

}  // namespace flash
