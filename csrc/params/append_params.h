#pragma once

#include "params/descales.h"
#include "params/seqlens.h"
#include "params/tensor_view.h"

namespace flash {

// Rotary tables [positions, rotary_dim / 2], of the elements' type. Null: nothing is rotated.
struct Rotary {
  const void* cos;
  const void* sin;
  int64_t cos_stride;  // from position to position
  int64_t sin_stride;
  int positions;
  int rotary_dim;
  bool interleaved;
  bool advance_q;  // query i is at position used_k + i; otherwise all are at used_k
};

// The new rows of a call with a cache: keys and values to append, and keys and queries to rotate.
struct NewRows {
  TensorView<const void> q;    // [b, sq, h, d]; q and q_rotated are there if q is rotated
  TensorView<void> q_rotated;  // [b, sq, h, d]
  TensorView<const void> k;    // [b, new_k, hk, d]
  TensorView<const void> v;
  TensorView<void> k_cache;  // [b, sk, hk, d], or pages; null: the call has no new rows
  TensorView<void> v_cache;
  int columns_k;  // columns of a row of the cache
  int columns_v;
  bool odd;            // see OddRows
  CodeDescales codes;  // of the cache; rows are coded on their way into it
  Rotary rotary;
};

// A CTA of the decode kernel writes all new keys that it reads; more keys than these are written by
// a launch of their own (launch/decode_schedule.h).
constexpr int kMostNewKeys = 8;

// Rotary pairs that a thread of the decode kernel rotates at a time, and never fewer.
constexpr int kPairsAtOnce = 4;

// New rows that a kernel of their own writes.
struct AppendParams {
  NewRows rows;
  Pages pages;
  Seqlens seqlens;  // used_k: keys that are there before
  FastDiv seqlen_q;
  FastDiv new_k;
  FastDiv heads_q;
  FastDiv heads_kv;
  int64_t queries;  // rows of q to rotate: 0, or b * sq * h
  int64_t keys;     // rows of k, and of v: b * new_k * hk
  int head_dim;     // of q
};

}  // namespace flash
