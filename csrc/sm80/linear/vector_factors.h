// What a chunk's tokens do that needs no state, with a vector of decays: Q and K times their
// decays, the decays of the state's rows, and A. A launch of its own makes it for all chunks; in
// the walks along segments, each tile of V would have to make it again.
#pragma once

#include "core/copy_async.h"
#include "sm80/linear/vector_weights.h"

namespace flash::sm80::linear {

// A chunk's factors that change the state.
template <class C>
struct VectorKeys {
  using Element = typename C::Element;
  alignas(16) Element keys[C::kChunk * C::kK];   // K times its decays to the step's end
  alignas(16) float factors[C::kStrips][C::kK];  // of the state's rows, over each step
};

// Those and the ones that the outputs need. Memory has these structs as [slots of chunks, heads],
// and a walk copies them to shared memory as they are.
template <class C>
struct VectorFactors : VectorKeys<C> {
  // scale Q times its decays from the step's begin, in two numbers.
  alignas(16) WideElement query[2][C::kChunk * C::kK];
  alignas(16) uint4 weights[C::kStrips][32];  // A, as operands

  __device__ static VectorFactors* of(ForwardParams const& p, int slot, int head) {
    return static_cast<VectorFactors*>(p.workspace.factors) + int64_t(slot) * p.heads + head;
  }
};

// The same sequences cut into chunks, not segments: slots number chunks then.
template <class C>
__device__ flash::linear::Sequences chunks_of_sequences(flash::linear::Sequences sequences) {
  sequences.chunk = C::kChunk;
  return sequences;
}

template <class C>
struct VectorFactorsStorage {
  using Element = typename C::Element;
  template <class T>
  using Tiles = T[C::kHeads][C::kChunk * C::kK];

  alignas(16) Tiles<Element> q, k;
  alignas(16) Tiles<float> g;
  // Operands of A: scale Q times its decays from the step's begin, K since its begin.
  alignas(16) Tiles<WideElement> query[2];
  alignas(16) Tiles<WideElement> inverse[C::kKeyParts];
  alignas(16) bool exact[C::kHeads][C::kStrips];  // steps with a sum below kLeastSum
};

template <class C>
struct ChunkOfVectors {
  using Element = typename C::Element;

  VectorParams const& p;
  Walk<C> const& walk;
  VectorFactorsStorage<C>& smem;
  bool const keys_only;

  // Q and K times their decays, by all threads.
  __device__ void set_rows() const {
    Own<C> const own;
    if (own.head >= walk.heads()) {
      return;
    }
    VectorFactors<C>& out = factors(own.head);
    StepSums<C> const sums(smem.g[own.head], p.forward.gate.fp32, own);
    set_factors(sums, own, out.factors[own.strip]);
    if (!(sums.all.x >= kLeastSum && sums.all.y >= kLeastSum)) {
      smem.exact[own.head][own.strip] = true;
    }
    float2 const since = {exp2_fast(-sums.all.x - kKeyShift), exp2_fast(-sums.all.y - kKeyShift)};
#pragma unroll
    for (int t = 0; t < C::kOwn; ++t) {
      int const at = own.at(t);
      float2 k = unpack<Element>(word(smem.k[own.head][at]));
      float2 const entering = sums.entering(t);
      k = {k.x * entering.x, k.y * entering.y};
      if constexpr (C::kReverse) {
        k = {k.x * p.scale.enters, k.y * p.scale.enters};
      }
      word(out.keys[at]) = pack<Element>(k.x, k.y);
      if (keys_only) {
        continue;
      }
      k = {k.x * since.x, k.y * since.y};
      if constexpr (C::kKeyParts == 2) {
        split<WideElement>(k, word(smem.inverse[0][own.head][at]),
                           word(smem.inverse[1][own.head][at]));
      } else {
        word(smem.inverse[0][own.head][at]) = pack<WideElement>(k.x, k.y);
      }
      float2 const q = unpack<Element>(word(smem.q[own.head][at]));
      float2 const read = sums.reading(t);
      float const scale = p.scale.reads;
      uint32_t query[2];
      split<WideElement>({q.x * (scale * read.x), q.y * (scale * read.y)}, query[0], query[1]);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        word(smem.query[part][own.head][at]) = query[part];
        word(out.query[part][at]) = query[part];
      }
    }
  }

  // A, a warp a step.
  __device__ void set_weights() const {
    int const lane = threadIdx.x % 32;
#pragma unroll 1
    for (int number = threadIdx.x / 32; number < walk.heads() * C::kStrips; number += C::kWarps) {
      int const head = number / C::kStrips, strip = number % C::kStrips;
      float left[4] = {}, right[4] = {};
      float scale;
      if (smem.exact[head][strip]) {
        ExactWeights<C> const pairs{smem.q[head], smem.k[head], smem.g[head], strip};
        pairs.cumulate(p.forward.gate.fp32);
        pairs.multiply_rows(left, right);
        scale = p.forward.scale;
      } else {
        operands(head).multiply_rows(strip, left, right);
        scale = 0x1p50f;
        static_assert(kKeyShift == 50.f);
      }
      factors(head).weights[strip][lane] = as_weights<Element, C::kReverse>(left, right, scale);
    }
  }

 private:
  template <class T>
  __device__ static uint32_t& word(T& first) {
    return reinterpret_cast<uint32_t&>(first);
  }
  __device__ VectorFactors<C>& factors(int head) const {
    return *VectorFactors<C>::of(p.forward, walk.tile.slot, walk.tile.head + head);
  }
  __device__ StepOperands<C> operands(int head) const {
    StepOperands<C> of;
    of.query[0] = smem.query[0][head];
    of.query[1] = smem.query[1][head];
#pragma unroll
    for (int part = 0; part < C::kKeyParts; ++part) {
      of.key[part] = smem.inverse[part][head];
    }
    return of;
  }
};

// grid: slots of chunks, and one tile of V. keys_only: nothing but VectorKeys is wanted.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
    vector_factors_kernel(__grid_constant__ VectorParams const vector,
                          __grid_constant__ LinearTiles const grid, bool const keys_only) {
  auto& smem = *reinterpret_cast<VectorFactorsStorage<C>*>(dynamic_smem());
  let_next_launch_start();
  ForwardParams const& p = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{p, tile, chunk_of(chunks_of_sequences<C>(p.sequences), tile.slot)};
  if (!walk.segment.exists()) {
    return;
  }
  auto const& tokens = walk.segment.tokens;
  load_heads<C, C::kK>(walk, tokens, p.k, p.group, 0, p.k_dim, p.aligned_k, smem.k);
  load_gates(walk, tokens, vector, smem.g);
  if (!keys_only) {
    load_heads<C, C::kK>(walk, tokens, p.q, p.group, 0, p.k_dim, p.aligned_k, smem.q);
  }
  cp_async_fence();
  if (threadIdx.x < C::kHeads * C::kStrips) {
    smem.exact[threadIdx.x / C::kStrips][threadIdx.x % C::kStrips] = false;
  }
  cp_async_wait<0>();
  __syncthreads();
  ChunkOfVectors<C> const chunk{vector, walk, smem, keys_only};
  chunk.set_rows();
  if (!keys_only) {
    __syncthreads();
    chunk.set_weights();
  }
}

// Whether the warp has a head. Where a CTA has one, so do all of its warps.
template <class C>
__device__ bool has_head(Walk<C> const& walk) {
  return C::kHeads == 1 || walk.exists();
}

// The chunks of a segment, as a walk along it loads them: factors and V, some chunks ahead.
template <class C, class Factors>
struct VectorStage {
  Factors factors[C::kHeads];
  alignas(16) typename C::Element v[C::kHeads][C::kChunk * C::kV];
};

template <class C, class Factors>
class VectorStream {
 public:
  using Stage = VectorStage<C, Factors>;
  int const chunks;

  __device__ VectorStream(Walk<C> const& walk, Stage* stages)
      : chunks(walk.segment.exists() ? walk.chunks() : 0),
        walk_(walk),
        stages_(stages),
        factors_(own_run(*VectorFactors<C>::of(walk.p, first_slot(), walk.tile.head))),
        values_(tiles_of_v(walk)) {}

  // Asks for the first chunks, whose factors are there once the launch before has ended.
  __device__ void begin() {
#pragma unroll
    for (int number = 0; number < kStages - 1; ++number) {
      load();
    }
  }
  // Waits for the next chunk, and asks for the one that takes the place of the chunk before it.
  __device__ Stage const& next() {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load();
    return stages_[turn(stage_)];
  }

 private:
  static constexpr int kStages = C::kStages;

  Walk<C> const& walk_;
  Stage* const stages_;
  uint128_t const* factors_;  // this thread's first run of those of the next chunk to be loaded
  WalkTiles<C, C::kV> values_;
  int loaded_ = 0;  // chunks
  int loading_ = 0, stage_ = 0;

  // The slot of the walk's first chunk.
  __device__ int first_slot() const {
    auto const& s = walk_.p.sequences;
    int const of_sequence =
        flash::linear::first_slot(chunks_of_sequences<C>(s), walk_.segment.sequence);
    return of_sequence + walk_.segment.index * (s.chunk / C::kChunk) +
           (C::kReverse ? chunks - 1 : 0);
  }
  // The stage's number, which becomes that of the next one.
  __device__ static int turn(int& stage) {
    int const number = stage;
    stage = number + 1 < kStages ? number + 1 : 0;
    return number;
  }
  template <class T>
  __device__ static uint128_t* own_run(T& x) {
    return reinterpret_cast<uint128_t*>(&x) + threadIdx.x;
  }
  __device__ void load() {
    if (loaded_ < chunks) {
      ForwardParams const& p = walk_.p;
      Stage& stage = stages_[turn(loading_)];
      constexpr int kOfHead = sizeof(VectorFactors<C>) / sizeof(uint128_t);
#pragma unroll
      for (int of = 0; of < C::kHeads; ++of) {
        if (C::kHeads == 1 || of < walk_.heads()) {
          copy(factors_ + of * kOfHead, own_run(stage.factors[of]));
        }
      }
      factors_ += (C::kReverse ? -kOfHead : kOfHead) * int64_t(p.heads);
      values_.load(walk_.chunk_in_order(loaded_).count, stage.v);
      ++loaded_;
    }
    cp_async_fence();
  }
  __device__ static void copy(uint128_t const* from, uint128_t* to) {
    constexpr int kRuns = sizeof(Factors) / sizeof(uint128_t);
    static_assert(kRuns * sizeof(uint128_t) == sizeof(Factors));
#pragma unroll
    for (int run = 0; run < kRuns; run += C::kThreads) {
      if (run + C::kThreads <= kRuns || int(threadIdx.x) < kRuns - run) {
        copy_chunk_async<128>(from[run], to[run], true);
      }
    }
  }
};

}  // namespace flash::sm80::linear
