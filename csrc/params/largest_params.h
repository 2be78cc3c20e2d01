#pragma once

#include <cstdint>

namespace flash {

// Rows' largest logits, of which each head's is wanted.
struct LargestParams {
  float const* rows;  // [batch, heads, length], contiguous
  float* out;         // [heads]
  int batch;
  int heads;
  int64_t length;  // rows of a sequence
};

}  // namespace flash
