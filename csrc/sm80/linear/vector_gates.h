// Linear attention with a vector of decays, one for each row of the state: gates in shared memory,
// and Q and K times their decays. A chunk is walked along in steps of 16 tokens: a step's factors
// are from its first token on, or to its last, so that none has tokens of two steps.
//
// In reverse, from the last token to the first, the same kernels make dV and the gradients of
// states: k and q change places (k reads, q enters the state), dO is in the place of v.
#pragma once

#include "linear/decay.h"
#include "sm80/linear/walk.h"

namespace flash::sm80::linear {

using flash::linear::VectorParams;

template <class C>
struct VectorSteps;

template <class Element_, int kTiling, flash::linear::Order kOrder = flash::linear::Order::Forward>
struct VectorConfig : WalkShape<Element_, flash::linear::kVectorTilings[kTiling]> {
  using Steps = VectorSteps<VectorConfig>;    // how a walk multiplies
  static constexpr int kStageAlignment = 16;  // of a chunk in shared memory
  // Every thread calls it between what it writes there and the barrier before products read it.
  __device__ static void let_products_see_writes() {}
  // A number that all lanes of a warp have.
  __device__ static int of_warp(int x) { return x; }
  using Shape = WalkShape<Element_, flash::linear::kVectorTilings[kTiling]>;
  static constexpr bool kReverse = kOrder == flash::linear::Order::Reverse;
  static_assert(Shape::kBlocks == 1);
  static constexpr int kStages = flash::linear::kVectorStages;
  static constexpr bool kOwnFactors = flash::linear::makes_own_factors(Shape::tiling);
  // Threads that share 16 tokens of two columns, and the tokens that each of them has.
  static constexpr int kPairs = Shape::kK / 2 * Shape::kStrips * Shape::kHeads;
  static constexpr int kShares = Shape::kThreads / kPairs, kOwn = 16 / kShares;
  static_assert(kShares * kPairs == Shape::kThreads && kShares <= 4);
  // K times what is above 1 in numbers of bf16, for their range: two, where K has fp16's digits.
  static constexpr int kKeyParts = std::is_same_v<Element_, half_t> ? 2 : 1;
};

// The thread's index, unknown to the compiler from here on: what is made of it is computed again
// for each chunk. Kept in registers, the addresses of one phase would spill those of another.
__device__ inline unsigned thread_index_here() {
  unsigned index = threadIdx.x;
  asm volatile("" : "+r"(index));
  return index;
}

// Gates of a chunk, as they come: rows of kK places of 4 bytes, whose first half has a row of
// 16-bit numbers. Nothing but single rows is read, so that they lie as in the tensor.
template <class C>
using GateTile = float[C::kChunk * C::kK];

// Runs of 16 bytes of gates of a dtype: which ones a thread has.
template <class C, class Number>
struct GateRuns {
  static constexpr int kNumbers = 16 / sizeof(Number);  // of a run
  static constexpr int kRuns = C::kK / kNumbers, kStep = C::kThreads / kRuns;
  static_assert(C::kThreads % kRuns == 0 && (C::kChunk % kStep == 0 || kStep > C::kChunk));
  int const row, column;

  __device__ explicit GateRuns(unsigned thread)
      : row(thread / kRuns), column(thread % kRuns * kNumbers) {}
};

// Fills a tile of gates (kChunk, kK) with the rows and columns that exist, and zeros. gates: the
// first row's first column. aligned: rows are whole runs of 16 bytes, copied asynchronously.
template <class C, class Number>
__device__ void load_gates(Number const* gates, int64_t row_stride, GateTile<C>& tile, int rows,
                           int columns, bool aligned) {
  using Runs = GateRuns<C, Number>;
  Runs const own(thread_index_here());
  Number const* source = gates + own.row * row_stride + own.column;
  auto* target = reinterpret_cast<Number*>(tile + own.row * C::kK) + own.column;
  int const left = columns - own.column;
  constexpr int kTargetStep = Runs::kStep * C::kK * int(sizeof(float) / sizeof(Number));
  if (aligned) {
    constexpr int kPasses = (C::kChunk + Runs::kStep - 1) / Runs::kStep;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      int const row = own.row + pass * Runs::kStep;
      // Fewer rows than threads have some of: the last threads have none.
      if (C::kChunk % Runs::kStep == 0 || row < C::kChunk) {
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(source), *reinterpret_cast<uint128_t*>(target),
            row < rows && left > 0);
      }
      source += Runs::kStep * row_stride;
      target += kTargetStep;
    }
    return;
  }
#pragma unroll 1
  for (int row = own.row; row < C::kChunk; row += Runs::kStep) {
#pragma unroll 1
    for (int e = 0; e < Runs::kNumbers; ++e) {
      target[e] = row < rows && e < left ? source[e] : Number(0.f);
    }
    source += Runs::kStep * row_stride;
    target += kTargetStep;
  }
}

// Starts to bring a chunk of a tensor, of all heads of a CTA. shared: heads that share one of x's.
template <class C, int kColumns>
__device__ void load_heads(Walk<C> const& walk, flash::linear::Tokens const& tokens,
                           TensorView<void const> const& x, int shared, int begin, int columns,
                           bool aligned,
                           typename C::Element (&out)[C::kHeads][C::kChunk * kColumns]) {
  using Element = typename C::Element;
#pragma unroll
  for (int of = 0; of < C::kHeads; ++of) {
    if (of < walk.heads()) {
      auto const* rows = rows_of<Element>(x, tokens, (walk.tile.head + of) / shared, begin);
      load_tile<C::kChunk, kColumns, C::kThreads>(rows, x.row_stride, out[of], tokens.count,
                                                  columns - begin, aligned);
    }
  }
}

// Where gates of tokens begin, of the CTA's first head and its tile of K.
template <class C>
__device__ char const* first_gate(Walk<C> const& walk, flash::linear::Tokens const& tokens,
                                  VectorParams const& p) {
  auto const& gate = p.forward.gate;
  int64_t const first = tokens.batch * gate.batch_stride + tokens.row * gate.row_stride +
                        walk.tile.head * gate.head_stride + walk.tile.k_begin;
  return static_cast<char const*>(gate.ptr) +
         first * int(gate.fp32 ? sizeof(float) : sizeof(typename C::Element));
}

// Starts to bring gates, from there on, of all heads of a CTA.
template <class C>
__device__ void load_gates(Walk<C> const& walk, VectorParams const& p, char const* first, int rows,
                           GateTile<C> (&out)[C::kHeads]) {
  using Element = typename C::Element;
  auto const& gate = p.forward.gate;
  int const columns = p.forward.k_dim - walk.tile.k_begin;
#pragma unroll
  for (int of = 0; of < C::kHeads; ++of) {
    if (of < walk.heads()) {
      int64_t const of_head = of * gate.head_stride;
      if (gate.fp32) {
        load_gates<C>(reinterpret_cast<float const*>(first) + of_head, gate.row_stride, out[of],
                      rows, columns, p.aligned_g);
      } else {
        load_gates<C>(reinterpret_cast<Element const*>(first) + of_head, gate.row_stride, out[of],
                      rows, columns, p.aligned_g);
      }
    }
  }
}

// Gates of a walk's chunks, one after the other.
template <class C>
class GateStream {
  Walk<C> const& walk_;
  VectorParams const& p_;
  char const* next_;  // the next chunk's first row, of the CTA's first head

 public:
  __device__ GateStream(Walk<C> const& walk, VectorParams const& p)
      : walk_(walk), p_(p), next_(first_gate(walk, walk.first_tokens(), p)) {}

  __device__ void load(int rows, GateTile<C> (&out)[C::kHeads]) {
    auto const& gate = p_.forward.gate;
    load_gates(walk_, p_, next_, rows, out);
    int const size = gate.fp32 ? sizeof(float) : sizeof(typename C::Element);
    next_ += (C::kReverse ? -C::kChunk : C::kChunk) * gate.row_stride * size;
  }
};

// A gate as its log2. Below -104 it is -104, whose factor is 0 in fp32: sums of 16 gates stay
// finite, and their differences exact to 2^-12.
__device__ inline float log2_of(float gate) {
  return fmaxf(gate, flash::linear::kLeastLog) * kLog2e;
}

// Two neighbouring columns' gates.
template <class C>
__device__ float2 gates_at(GateTile<C> const& tile, bool fp32, int row, int column) {
  float const* const places = tile + row * C::kK;
  if (fp32) {
    return *reinterpret_cast<float2 const*>(places + column);
  }
  using Element = typename C::Element;
  return unpack<Element>(
      *reinterpret_cast<uint32_t const*>(reinterpret_cast<Element const*>(places) + column));
}

// What a thread prepares of a chunk: some tokens of a step, of two columns of K.
template <class C>
struct Own {
  static constexpr int kAcross = C::kK / 2 < 32 / C::kShares ? C::kK / 2 : 32 / C::kShares;

  int column, share, strip, head;  // head: of the CTA

  __device__ Own() {
    unsigned number = thread_index_here();
    column = number % kAcross * 2;
    number /= kAcross;
    share = number % C::kShares;
    number /= C::kShares;
    column += number % (C::kK / 2 / kAcross) * 2 * kAcross;
    number /= C::kK / 2 / kAcross;
    strip = number % C::kStrips;
    head = number / C::kStrips;
  }
  __device__ int row(int token) const { return strip * 16 + share * C::kOwn + token; }
  // In a tile of Q or K.
  __device__ int at(int token) const {
    return offset_in_tile<C::kK>(row(token), column / kRunElements) + column % kRunElements;
  }
};

// Sums of log2 decays of a thread's tokens, from the step's begin, and of the whole step. They do
// not grow, rounding included: no difference of an earlier and a later one is above 0.
template <class C>
struct StepSums {
  float2 until[C::kOwn];
  float2 all;

  __device__ StepSums(GateTile<C> const& tile, bool fp32, Own<C> const& own) {
#pragma unroll
    for (int t = 0; t < C::kOwn; ++t) {
      until[t] = gates_at<C>(tile, fp32, own.row(t), own.column);
    }
    all = {0.f, 0.f};
#pragma unroll
    for (int t = 0; t < C::kOwn; ++t) {
      all.x += log2_of(until[t].x);
      all.y += log2_of(until[t].y);
      until[t] = all;
    }
#pragma unroll
    for (int distance = 1; distance < C::kShares; distance *= 2) {
      float const x = __shfl_xor_sync(0xffffffffu, all.x, distance * Own<C>::kAcross);
      float const y = __shfl_xor_sync(0xffffffffu, all.y, distance * Own<C>::kAcross);
      bool const is_later = own.share & distance;
#pragma unroll
      for (int t = 0; t < C::kOwn; ++t) {
        until[t].x += is_later ? x : 0.f;
        until[t].y += is_later ? y : 0.f;
      }
      all.x += x;
      all.y += y;
    }
  }

  __device__ float2 from_begin(int t) const {
    return {exp2_fast(until[t].x), exp2_fast(until[t].y)};
  }
  __device__ float2 to_end(int t) const {
    return {exp2_fast(all.x - until[t].x), exp2_fast(all.y - until[t].y)};
  }
  // The factor of what reads the state before the step, and of what enters the one after it; in
  // reverse, of the step's end and begin.
  __device__ float2 reading(int t) const { return C::kReverse ? to_end(t) : from_begin(t); }
  __device__ float2 entering(int t) const { return C::kReverse ? from_begin(t) : to_end(t); }
};

// Where the decay of a row of the state is among those of a step: of 16 rows, the four of a lane's
// accumulators are neighbours.
__device__ inline int decay_place(int k) {
  return (k & ~15) + k % 8 / 2 * 4 + k % 16 / 8 * 2 + k % 2;
}

// Of 16 rows of the state from `row` on, the four of a lane's accumulators.
__device__ inline float4 decays_of_rows(float const* decays, int row, int lane) {
  return *reinterpret_cast<float4 const*>(&decays[row + lane % 4 * 4]);
}
// What is left of a lane's accumulators, of eight rows and the next eight.
__device__ inline void decay_rows(float4 const& left, float (&near)[4], float (&far)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    near[e] *= e % 2 ? left.y : left.x;
    far[e] *= e % 2 ? left.w : left.z;
  }
}

// A step's decays of the state's rows.
template <class C>
__device__ void set_decays(StepSums<C> const& sums, Own<C> const& own, float* decays) {
  if (own.share == 0) {
    *reinterpret_cast<float2*>(&decays[decay_place(own.column)]) = {exp2_fast(sums.all.x),
                                                                    exp2_fast(sums.all.y)};
  }
}

}  // namespace flash::sm80::linear
