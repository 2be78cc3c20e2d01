// What the kernels of linear attention are given.
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

  __device__ int64_t offset(int sequence, int head, int k, int v) const {
    return sequence * sequence_stride + head * head_stride + k * k_stride + v * v_stride;
  }
  __device__ T* at(int sequence, int head, int k, int v) const {
    return ptr + offset(sequence, head, k, v);
  }
};

// Log decays: of each token and head, or, with strides 0, of each head. ptr null: none.
struct GateView {
  void const* ptr;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  bool fp32;  // else q's dtype
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
  void* factors;   // [slots of chunks, h]: with a vector of decays, what needs no state
};

// What sums of states are made of: from a sequence's first chunk to its last, or, for the gradients
// of states, from the last to the first, of q's and of o's gradient in the place of k and v.
enum class Order : uint8_t { Forward, Reverse };

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
  Order order;
  bool aligned_k;  // rows of q and k are whole runs of 16 bytes
  bool aligned_v;  // of v and o

  // Columns of a state in memory: whole runs of 16 bytes.
  FLASH_HD int v_columns() const { return (v_dim + 7) / 8 * 8; }
  FLASH_HD int64_t state_size() const { return int64_t(k_dim) * v_columns(); }
};

// How a call's scale = reads * enters is divided between what reads a state and what enters it.
// Launches keep states divided by `unit`, a power of two, so that what enters, in 16 bits, is not
// too small for fp16 only because of the scale.
struct StateScale {
  float reads;
  float enters;
  float unit;
};

// With a vector of decays: forward.gate has rows of K log decays, one after the other in memory,
// and forward.workspace.decays those of a segment, [slots, h, k tile]. In reverse q and k have
// changed places, v is o's gradient, and initial the final state's.
struct VectorParams {
  ForwardParams forward;
  bool aligned_g;  // its rows are whole runs of 16 bytes
  StateScale scale;
};

// dQ, or in reverse dK: the state that walk.forward.k and v make, times `reading`. walk.forward.q:
// what the gradient is multiplied by in the gates' gradient.
struct VectorGradientsParams {
  VectorParams walk;
  TensorView<void const> reading;  // [b, t, h, v]: o's gradient, or v
  TensorView<void> out;            // [b, t, h, k], for each head of v
  float* dg;                       // [b, t, h, k]; null: not wanted. dQ's part comes first
  int64_t v_tile_stride;           // from one tile of V's parts of out, and of dg, to the next
  uint4* states;                   // bf16, before each 16 tokens, as registers have them
  bool fp32;                       // of out; else q's dtype
};

// out = the sum of what tiles leave, [tiles][numbers], of the tokens of sequences.
struct PartsParams {
  float const* parts;
  int tiles;
  int64_t numbers;  // of out
  void* out;
  int64_t of_token;  // numbers
  Sequences sequences;
};

// All gradients with a vector of decays. dV is what the walk in reverse, dk.walk, puts out.
struct VectorBackwardParams {
  VectorGradientsParams dq;
  VectorGradientsParams dk;
};

// `forward` is the forward's call, from which the states before chunks are computed again; of its
// outputs and states only `initial` is read.
struct BackwardParams {
  ForwardParams forward;
  TensorView<void const> dout;  // [b, t, h, v]
  TensorView<void> dq;          // [b, t, h, k], for each head of v
  TensorView<void> dk;
  TensorView<void> dv;  // [b, t, h, v]
  float* dg;            // [b, t, h]; null: not wanted
  StateView<float const> dfinal;
  StateView<float> dinitial;
  void* dstates;  // [slots, h, k, v in chunks], bf16: the gradient of the state after the chunk
  bool fp32;      // of dq and dk; else q's dtype
};

}  // namespace flash::linear
