#pragma once

#include "params/common.h"

namespace flash {

// A tensor [b, s, h, d] with unit stride in d. A varlen tensor [total, h, d] has batch_stride 0,
// and its sequences start at row offsets. Strides count elements.
template <class T>
struct TensorView {
  T* ptr;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;

  FLASH_HD int64_t offset(int batch, int64_t row, int head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }

  // Whether batch entries are so many rows apart, or a multiple of them.
  FLASH_HD bool whole_rows_apart(int64_t rows = 1) const {
    return batch_stride == 0 || (row_stride > 0 && batch_stride % (rows * row_stride) == 0);
  }

  // Whether an int can number the rows of all batch entries.
  FLASH_HD bool numbers_rows(int64_t batch, int64_t rows) const {
    if (batch <= 1 || batch_stride == 0) {
      return true;
    }
    return whole_rows_apart() && (batch - 1) * (batch_stride / row_stride) + rows < INT32_MAX;
  }
};

// One fp32 number per row and head: LSE [b, h, s], or varlen [h, total] with batch_stride 0.
struct RowView {
  float* ptr;
  int64_t batch_stride;
  int64_t head_stride;

  FLASH_HD float* at(int batch, int64_t row, int head) const {
    return ptr + batch * batch_stride + head * head_stride + row;
  }
};

}  // namespace flash
