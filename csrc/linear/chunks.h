// Which tokens a slot's chunk has.
#pragma once

#include <algorithm>

#include "linear/params.h"
#include "linear/tilings.h"

namespace flash::linear {

struct Tokens {
  int batch;
  int64_t row;  // of the first one, in the tensors
  int count;
};

// On a GPU cu_seqlens was not checked: whatever it holds, tokens are inside the tensor.
struct CheckedOffsets {
  Sequences const& s;

  __device__ int operator()(int n) const { return std::min(std::max(s.cu[n], 0), s.seqlen); }
};

__device__ inline int first_slot(Sequences const& s, int n) {
  return s.cu ? CheckedOffsets{s}(n) / s.chunk + n : n * chunks_of(s.seqlen, s.chunk);
}

// All tokens of sequence n.
__device__ inline Tokens tokens_of(Sequences const& s, int n) {
  if (!s.cu) {
    return {n, 0, s.seqlen};
  }
  CheckedOffsets const offset{s};
  int const begin = offset(n);
  return {0, begin, std::max(offset(n + 1) - begin, 0)};
}

struct Chunk {
  int sequence;
  int index;  // in the sequence
  bool last;  // of the sequence
  Tokens tokens;

  __device__ bool exists() const { return tokens.count > 0; }
};

// The last sequence that begins at this slot or before it.
__device__ inline int sequence_of(Sequences const& s, int slot) {
  int low = 0;
  for (int high = s.count - 1; low < high;) {
    int const middle = (low + high + 1) / 2;
    if (first_slot(s, middle) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ inline Chunk chunk_of(Sequences const& s, int slot) {
  int const n = s.cu ? sequence_of(s, slot) : slot / chunks_of(s.seqlen, s.chunk);
  int const index = slot - first_slot(s, n);
  Tokens tokens = tokens_of(s, n);
  int const begin = index * s.chunk;
  tokens.row += begin;
  int const left = tokens.count - begin;
  // Slots before the first sequence's, whose tokens are in no sequence, have no chunk.
  tokens.count = index < 0 ? 0 : std::min(left, s.chunk);
  bool const last = index >= 0 && (left > 0 || index == 0) && left <= s.chunk;
  return {n, index, last, tokens};
}

}  // namespace flash::linear
