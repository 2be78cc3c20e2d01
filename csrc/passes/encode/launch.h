#pragma once

#include "launch/variant.h"

namespace flash {

// A tensor of which codes (e4m3) are made. Element types are erased here.
struct EncodedTensor {
  TensorView<const void> x;  // [b, s, h, d], or varlen [total, h, d]
  TensorView<void> codes;    // like x
  float* descales;           // [b, heads_kv]
  float* mean;               // [b, h, d] of the rows, which is taken off them; null: nothing is
  int const* cu_rows;        // [b + 1] of varlen, which has no mean; else null
  int rows;                  // s, or total
  int heads;
  int columns;  // a multiple of 16, at most kMostEncodedColumns
};

constexpr int kMostEncodedColumns = 256;
// Rows of a head that one CTA looks through for their largest number.
constexpr int kEncodedSlice = 512;

struct EncodeParams {
  EncodedTensor tensors[3];  // q, k, v, or q alone
  int count;                 // of tensors
  // What slices of rows leave, tensor after tensor, [b, h, slices], or varlen [h, slices]: their
  // largest number, or for a tensor with a mean [3, columns]: sum, least and largest of each
  // column.
  float* parts;
  int batch;
  int heads_kv;
};

// Numbers that a slice of a tensor's rows leaves.
FLASH_HD int numbers_of_slice(EncodedTensor const& t) { return t.mean ? 3 * t.columns : 1; }

// Numbers of `parts`.
int64_t numbers_of_parts(EncodeParams const& params);

// dtype: "bf16" or "fp16".
void launch_encode(EncodeParams const& params, char const* dtype, LaunchContext const& launch);

}  // namespace flash
