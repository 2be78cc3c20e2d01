// What a chunk's tokens do that needs no state, with a vector of decays: Q and K times their
// decays, the decays of the state's rows, and A. Where K is above 16 a launch of its own makes it
// for all chunks; in the walks along segments, each tile of V would have to make it again.
#pragma once

#include "sm80/linear/vector_weights.h"

namespace flash::sm80::linear {

// A tile whose columns lie in runs of at most 64: run after run, and within one row after row. This
// is how Hopper's wgmma reads its operands (sm90/tensor_core.h).
template <int kRows, int kColumns>
struct RunTile {
  static constexpr int kRun = kColumns < 64 ? kColumns : 64;

  __device__ static int at(int row, int column) {
    return column / kRun * (kRows * kRun) +
           offset_in_tile<kRun>(row, column % kRun / kRunElements) + column % kRunElements;
  }
  // As linear::read_square, with lanes of its columns.
  template <bool kTransposed, class Element>
  __device__ static void read_square(Element const* tile, int row, int column, LanePlace lane,
                                     uint32_t (&out)[4]) {
    linear::read_square<kTransposed, kRun>(tile + column / kRun * (kRows * kRun), row,
                                           column % kRun, lane, out);
  }
};
template <class C>
using FactorTile = RunTile<C::kChunk, C::kK>;

// A chunk's factors that change the state.
template <class C>
struct VectorKeys {
  using Element = typename C::Element;
  alignas(16) Element rows[C::kChunk * C::kK];  // K times its decays to the step's end
  alignas(16) float decays[C::kStrips][C::kK];  // of the state's rows, over each step
};

// Those and the ones that the outputs need. Memory has these structs as [slots of chunks, heads],
// and a walk copies them to shared memory as they are.
template <class C>
struct VectorFactors {
  using Element = typename C::Element;
  // scale Q times its decays from the step's begin, in two numbers.
  alignas(16) WideElement query[2][C::kChunk * C::kK];
  VectorKeys<C> keys;
  alignas(16) Element weights[C::kStrips][16 * 16];  // A

  __device__ static VectorFactors* of(ForwardParams const& p, int slot, int head) {
    return static_cast<VectorFactors*>(p.workspace.factors) + int64_t(slot) * p.heads + head;
  }
};

// The same sequences cut into pieces of so many tokens, not into segments: slots number those then.
__device__ inline flash::linear::Sequences cut_sequences(flash::linear::Sequences sequences,
                                                         int tokens) {
  sequences.chunk = tokens;
  return sequences;
}

// Factors of a walk's first chunk and head. piece: tokens that the sequences were cut into for it.
template <class C>
__device__ VectorFactors<C>& first_factors(Walk<C> const& walk, int piece, int chunks) {
  int const of_sequence =
      flash::linear::first_slot(cut_sequences(walk.p.sequences, C::kChunk), walk.segment.sequence);
  int const slot =
      of_sequence + walk.segment.index * (piece / C::kChunk) + (C::kReverse ? chunks - 1 : 0);
  return *VectorFactors<C>::of(walk.p, slot, walk.tile.head);
}

// Tokens of a CTA, chunk after chunk: what it computes once for all of them is as long as a chunk.
constexpr int kFactorTokens = 128;
constexpr int kFactorThreads = 768;  // of an SM, for which registers are left

template <class C>
struct VectorFactorsStorage {
  using Element = typename C::Element;
  template <class T>
  using Tiles = T[C::kHeads][C::kChunk * C::kK];
  struct Rows {
    alignas(16) Tiles<Element> q, k;
    alignas(16) Tiles<float> g;
    alignas(16) bool exact[C::kHeads][C::kStrips];  // steps with a sum below kLeastSum
  };

  Rows rows[2];  // a chunk's, and the next one's
  // Operands of A: scale Q times its decays from the step's begin, K since its begin.
  alignas(16) Tiles<WideElement> query[2];
  alignas(16) Tiles<WideElement> inverse[C::kKeyParts];
};

template <class C>
struct ChunkOfVectors {
  using Element = typename C::Element;

  VectorParams const& p;
  Walk<C> const& walk;
  VectorFactorsStorage<C>& smem;
  typename VectorFactorsStorage<C>::Rows& rows;
  VectorFactors<C>* const out;  // [heads]
  bool const keys_only;

  // Q and K times their decays, by all threads.
  __device__ void set_rows(Own<C> const& own) const {
    if (own.head >= walk.heads()) {
      return;
    }
    VectorFactors<C>& of_head = out[own.head];
    StepSums<C> const sums(rows.g[own.head], p.forward.gate.fp32, own);
    set_decays(sums, own, of_head.keys.decays[own.strip]);
    if (!(sums.all.x >= kLeastSum && sums.all.y >= kLeastSum)) {
      rows.exact[own.head][own.strip] = true;
    }
    float2 const since = {exp2_fast(-sums.all.x - kKeyShift), exp2_fast(-sums.all.y - kKeyShift)};
#pragma unroll
    for (int t = 0; t < C::kOwn; ++t) {
      int const at = own.at(t), out_at = FactorTile<C>::at(own.row(t), own.column);
      float2 k = unpack<Element>(word(rows.k[own.head][at]));
      float2 const entering = sums.entering(t);
      k = {k.x * entering.x, k.y * entering.y};
      if constexpr (C::kReverse) {
        k = {k.x * p.scale.enters, k.y * p.scale.enters};
      }
      word(of_head.keys.rows[out_at]) = pack<Element>(k.x, k.y);
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
      float2 const q = unpack<Element>(word(rows.q[own.head][at]));
      float2 const read = sums.reading(t);
      float const scale = p.scale.reads;
      uint32_t query[2];
      split<WideElement>({q.x * (scale * read.x), q.y * (scale * read.y)}, query[0], query[1]);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        word(smem.query[part][own.head][at]) = query[part];
        word(of_head.query[part][out_at]) = query[part];
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
      if (rows.exact[head][strip]) {
        ExactWeights<C> const pairs{rows.q[head], rows.k[head], rows.g[head], strip};
        pairs.cumulate(p.forward.gate.fp32);
        pairs.multiply_rows(left, right);
        scale = p.forward.scale;
      } else {
        operands(head).multiply_rows(strip, left, right);
        scale = 0x1p50f;
        static_assert(kKeyShift == 50.f);
      }
      store_weights<Element, C::kReverse>(left, right, scale, lane, out[head].weights[strip]);
    }
  }

 private:
  template <class T>
  __device__ static uint32_t& word(T& first) {
    return reinterpret_cast<uint32_t&>(first);
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

// Q, K and gates of a CTA's chunks, one after the other.
template <class C>
class FactorRows {
 public:
  using Rows = typename VectorFactorsStorage<C>::Rows;
  int const chunks;

  __device__ FactorRows(Walk<C> const& walk, VectorParams const& p)
      : chunks(walk.chunks()),
        walk_(walk),
        q_(tiles_of_k(walk, p.forward.q)),
        k_(tiles_of_k(walk, p.forward.k)),
        g_(walk, p) {}

  // Asks for the next chunk's, if there is one.
  __device__ void load(Rows& out, bool with_q) {
    if (loaded_ < chunks) {
      int const count = walk_.chunk_in_order(loaded_).count;
      k_.load(count, out.k);
      g_.load(count, out.g);
      if (with_q) {
        q_.load(count, out.q);
      }
      if (threadIdx.x < C::kHeads * C::kStrips) {
        out.exact[threadIdx.x / C::kStrips][threadIdx.x % C::kStrips] = false;
      }
      ++loaded_;
    }
    cp_async_fence();
  }

 private:
  Walk<C> const& walk_;
  WalkTiles<C, C::kK> q_, k_;
  GateStream<C> g_;
  int loaded_ = 0;
};

// grid: slots of kFactorTokens, and one tile of V. keys_only: nothing but VectorKeys is wanted.
template <class C>
__global__ void __launch_bounds__(C::kThreads, kFactorThreads / C::kThreads)
    vector_factors_kernel(__grid_constant__ VectorParams const vector,
                          __grid_constant__ LinearTiles const grid, bool const keys_only) {
  auto& smem = *reinterpret_cast<VectorFactorsStorage<C>*>(dynamic_smem());
  let_next_launch_start();
  ForwardParams const& p = vector.forward;
  Tile const tile = tile_of(grid, blockIdx.x, C::kK, C::kV, C::kHeads);
  Walk<C> const walk{p, tile,
                     flash::linear::chunk_of(cut_sequences(p.sequences, kFactorTokens), tile.slot)};
  if (!walk.segment.exists()) {
    return;
  }
  FactorRows<C> stream(walk, vector);
  VectorFactors<C>* out = &first_factors(walk, kFactorTokens, stream.chunks);
  stream.load(smem.rows[0], !keys_only);
  Own<C> const own;
#pragma unroll 1
  for (int number = 0; number < stream.chunks; ++number) {
    cp_async_wait<0>();
    __syncthreads();
    stream.load(smem.rows[(number + 1) % 2], !keys_only);
    ChunkOfVectors<C> const chunk{vector, walk, smem, smem.rows[number % 2], out, keys_only};
    chunk.set_rows(own);
    if (!keys_only) {
      __syncthreads();
      chunk.set_weights();
    }
    out += C::kReverse ? -p.heads : p.heads;
  }
}

}  // namespace flash::sm80::linear
