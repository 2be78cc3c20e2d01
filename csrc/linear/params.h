// What the kernels of linear attention with scalar decay are given.
#pragma once

#include <cuda_runtime.h>

#include "params/tensor_view.h"

namespace flash::linear {

// States [n, h, k, v], fp32, of any strides. ptr null: zeros, or not wanted.
template <class T>
struct StateView {
  T* ptr;
  int64_t sequence_stride;
  int64_t head_stride;
  int64_t k_stride;
  int64_t v_stride;

  __device__ T* at(int sequence, int head, int k, int v) const {
    return ptr + sequence * sequence_stride + head * head_stride + k * k_stride + v * v_stride;
  }
};

// Log decays: of each token and head, or, with strides 0, of each head. ptr null: none.
struct GateView {
  void const* ptr;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  bool wide;  // fp32; else q's dtype
};

// Slots number the chunks of all sequences: chunk c of sequence n has slot first_slot(n) + c. A
// slot may be without a chunk, and a chunk counts tokens from its sequence's start.
struct Sequences {
  int const* cu;  // [count + 1]; null: dense
  int count;
  int seqlen;  // dense: tokens of each; varlen: of all
  int chunk;   // tokens
  int slots;
};

// Memory between the launches, for each slot and head.
struct Workspace {
  float* sums;     // [slots, h, k, v in chunks]: what the chunk adds to the state
  void* states;    // the same in bf16: the state before the chunk
  float* decays;   // [slots, h]: of the state, over the whole chunk
  uint4* weights;  // [slots, h, strips, strips, lanes]: A, where K is tiled
};

struct ForwardParams {
  TensorView<void const> q;  // [b, t, hk, k]
  TensorView<void const> k;
  TensorView<void const> v;  // [b, t, h, v]
  TensorView<void> o;
  GateView gate;
  StateView<float const> initial;
  StateView<float> final;
  Sequences sequences;
  Workspace workspace;
  int heads;
  int group;  // heads that share one of q and k
  int k_dim;
  int v_dim;
  float scale;
  bool aligned_k;  // rows of q and k are whole runs of 16 bytes
  bool aligned_v;  // of v and o

  // Columns of a state in memory: whole runs of 16 bytes.
  FLASH_HD int v_columns() const { return (v_dim + 7) / 8 * 8; }
  FLASH_HD int64_t state_size() const { return int64_t(k_dim) * v_columns(); }
};

}  // namespace flash::linear
