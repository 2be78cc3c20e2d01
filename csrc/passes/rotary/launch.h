#pragma once

#include "launch/variant.h"

namespace flash {

// Heads that are rotated by one table, or copied. Element types are erased here.
struct RotaryHeads {
  TensorView<const void> x;    // [b, s, h, d], or varlen [total, h, d]
  TensorView<void> out;        // like x, which it may be
  TensorView<const void> cos;  // [positions, rotary_dim / 2], or [b, s, rotary_dim / 2]; null: copy
  TensorView<const void> sin;
  int heads;
};

// Where the tokens of x are in their sequences.
struct RotaryPlaces {
  const int* cu_seqlens;  // [b + 1] of a varlen x, or null
  const int* offsets;     // [b] position of a sequence's first token; null: all have `offset`
  int64_t offset;
  int batch;
  int seqlen;     // rows of a sequence, or of a whole varlen x
  int positions;  // rows of the tables
};

struct RotaryParams {
  RotaryHeads parts[3];  // x, k, and heads to copy; a part that the call lacks has no heads
  RotaryPlaces places;
  int64_t tokens;  // b * s, or total
  int head_dim;
  int half;  // rotary_dim / 2
  bool interleaved;
  bool conjugate;    // rotate by the negative angle
  bool in_place;     // elements that are not rotated are already in place
  bool wide_tables;  // fp32, whatever x's type is
};

// dtype: of x, "bf16", "fp16" or "fp32".
void launch_rotary(RotaryParams const& params, char const* dtype, LaunchContext const& launch);

}  // namespace flash
