// Cumulated decays of a chunk, and factors that are products of the decays between two tokens.
#pragma once

#include "core/softmax.h"
#include "linear/chunks.h"

namespace flash::linear {

// The sum of the log2 decays from a chunk's first token to this one. Decays below e^-104, which is
// 0 in fp32, are counted and left out of the sum: so -inf has no part in any difference, and large
// numbers do not take the precision of small ones.
struct Cumulated {
  float log;
  int cuts;
};

constexpr float kLeastLog = -104.f;

// What is left at `later` of what was there at `earlier`; at most 1.
__device__ inline float decay_between(Cumulated earlier, Cumulated later) {
  return earlier.cuts == later.cuts ? exp2_fast(later.log - earlier.log) : 0.f;
}

template <class Element>
__device__ float log_decay(GateView const& gate, Tokens const& tokens, int head, int token) {
  if (!gate.ptr || token >= tokens.count) {
    return 0.f;
  }
  int64_t const at = tokens.batch * gate.batch_stride + (tokens.row + token) * gate.row_stride +
                     head * gate.head_stride;
  return gate.wide ? static_cast<float const*>(gate.ptr)[at]
                   : static_cast<float>(static_cast<Element const*>(gate.ptr)[at]);
}

// A warp cumulates the decays of a head's chunk; lanes have neighbouring tokens each.
template <int kChunk, class Element>
__device__ void cumulate(GateView const& gate, Tokens const& tokens, int head, Cumulated* out) {
  constexpr int kOwn = kChunk / 32;
  static_assert(kChunk % 32 == 0);
  int const lane = threadIdx.x % 32;
  Cumulated own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = {log_decay<Element>(gate, tokens, head, lane * kOwn + i), 0};
  }
  Cumulated sum{0.f, 0};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    bool const cut = !(own[i].log >= kLeastLog);
    sum.log += cut ? 0.f : own[i].log * kLog2e;
    sum.cuts += cut;
    own[i] = sum;
  }
  Cumulated before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    float const log = __shfl_up_sync(0xffffffffu, before.log, distance);
    int const cuts = __shfl_up_sync(0xffffffffu, before.cuts, distance);
    before.log += lane >= distance ? log : 0.f;
    before.cuts += lane >= distance ? cuts : 0;
  }
  before.log = __shfl_up_sync(0xffffffffu, before.log, 1);
  before.cuts = __shfl_up_sync(0xffffffffu, before.cuts, 1);
  if (lane == 0) {
    before = {0.f, 0};
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    out[lane * kOwn + i] = {before.log + own[i].log, before.cuts + own[i].cuts};
  }
}

}  // namespace flash::linear
