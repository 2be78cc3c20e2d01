#pragma once

#include "params/tensor_view.h"

namespace flash {

// Heads that turn by one table, or are copied. Element types are erased here.
struct RotaryHeads {
  TensorView<const void> x;    // [b, s, h, d], or packed [total, h, d]
  TensorView<void> out;        // like x, which it may be
  TensorView<const void> cos;  // [positions, rotary_dim / 2], or [b, s, rotary_dim / 2]; null: copy
  TensorView<const void> sin;
  int heads;
};

// Where the tokens of x are in their sequences.
struct RotaryPlaces {
  const int* cu_seqlens;  // [b + 1] of a packed x, or null
  const int* offsets;     // [b] position of a sequence's first token, or null:
  int64_t offset;         // that of all sequences
  int batch;
  int seqlen;     // rows of x: of a sequence, or of all
  int positions;  // rows of the tables
};

struct RotaryParams {
  RotaryHeads parts[3];  // those that are not there have no heads
  RotaryPlaces places;
  int64_t tokens;  // b * s, or total
  int head_dim;
  int half;  // rotary_dim / 2
  bool interleaved;
  bool conjugate;    // turn back
  bool in_place;     // what does not turn is where it belongs
  bool wide_tables;  // fp32, whatever x is
};

}  // namespace flash
