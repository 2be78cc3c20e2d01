#pragma once

#include "params/fast_div.h"
#include "params/pages.h"
#include "params/seqlens.h"
#include "params/tensor_view.h"

namespace flash {

// Rotary tables [positions, rotary_dim / 2], of the elements' type. Null: nothing turns.
struct Rotary {
  const void* cos;
  const void* sin;
  int64_t cos_stride;  // from position to position
  int64_t sin_stride;
  int positions;
  int rotary_dim;
  bool interleaved;
  bool advance_q;  // query i is at position used_k + i; else all are at used_k
};

// Turns new keys, and queries, and writes keys and values into a cache.
struct AppendParams {
  TensorView<const void> q;   // [b, sq, h, d]; read where q turns
  TensorView<void> q_turned;  // [b, sq, h, d]; null: q stays as it is
  TensorView<const void> k;   // [b, new_k, hk, d]
  TensorView<const void> v;   // [b, new_k, hk, dv]
  TensorView<void> k_cache;   // [b, sk, hk, d], or pages
  TensorView<void> v_cache;
  Pages pages;
  Seqlens seqlens;  // used_k: keys there before
  Rotary rotary;
  FastDiv seqlen_q;
  FastDiv new_k;
  FastDiv heads_q;
  FastDiv heads_kv;
  int64_t queries;  // rows of q that turn: 0, or b * sq * h
  int64_t keys;     // rows of k, and of v: b * new_k * hk
  int head_dim;
  int head_dim_v;
};

}  // namespace flash
