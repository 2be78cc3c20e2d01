// Descriptors by which the TMA unit finds its way in a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash::sm90 {

// A tensor of 16-bit elements [batch, rows, heads, columns], unit stride in the last dimension, and
// the box of it that one TMA instruction copies: box_rows rows, box_columns columns, of one head.
// A box has as many columns as a row of its swizzle pattern: 64 or 32.
struct TensorMapRequest {
  void const* ptr;
  int64_t columns;
  int64_t rows;
  int64_t heads;
  int64_t batch;
  int64_t row_stride;  // of elements; a multiple of 8
  int64_t head_stride;
  int64_t batch_stride;
  int box_rows;
  int box_columns;
};

// What a kernel is given. Coordinates of a box: (column, row, head * head_step, batch *
// batch_step). What a box covers beyond the tensor is filled with zeros.
struct TensorMap {
  CUtensorMap map;
  int head_step;  // 0 for a dimension without a stride of its own: expanded, or of size 1
  int batch_step;
};

TensorMap make_tensor_map(TensorMapRequest const& request);

}  // namespace flash::sm90
