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
  return gate.fp32 ? static_cast<float const*>(gate.ptr)[at]
                   : static_cast<float>(static_cast<Element const*>(gate.ptr)[at]);
}

// A lane's own of a chunk's log decays: those of neighbouring tokens.
template <int kChunk>
struct LogDecays {
  static_assert(kChunk % 32 == 0);
  static constexpr int kOwn = kChunk / 32;
  float own[kOwn];
};

template <int kChunk, class Element>
__device__ LogDecays<kChunk> log_decays(GateView const& gate, Tokens const& tokens, int head) {
  LogDecays<kChunk> logs;
#pragma unroll
  for (int i = 0; i < logs.kOwn; ++i) {
    logs.own[i] = log_decay<Element>(gate, tokens, head, threadIdx.x % 32 * logs.kOwn + i);
  }
  return logs;
}

// A warp cumulates the decays of a head's chunk.
template <int kChunk>
__device__ void cumulate(LogDecays<kChunk> const& logs, Cumulated* out) {
  constexpr int kOwn = LogDecays<kChunk>::kOwn;
  int const lane = threadIdx.x % 32;
  Cumulated own[kOwn];
  Cumulated sum{0.f, 0};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    bool const cut = logs.own[i] < kLeastLog;  // a NaN stays one
    sum.log += cut ? 0.f : logs.own[i] * kLog2e;
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

template <int kChunk, class Element>
__device__ void cumulate(GateView const& gate, Tokens const& tokens, int head, Cumulated* out) {
  cumulate<kChunk>(log_decays<kChunk, Element>(gate, tokens, head), out);
}

}  // namespace flash::linear
