// The chunks of a segment, as a walk along it loads them: factors, and V.
#pragma once

#include "core/copy_async.h"
#include "sm80/linear/vector_factors.h"

namespace flash::sm80::linear {

// Whether the warp has a head. Where a CTA has one, so do all of its warps.
template <class C>
__device__ bool has_head(Walk<C> const& walk) {
  return C::kHeads == 1 || walk.exists();
}

// All of them, or those that change the state.
template <class Factors, class C>
__device__ Factors& part_of_factors(VectorFactors<C>& all) {
  if constexpr (std::is_same_v<Factors, VectorKeys<C>>) {
    return all.keys;
  } else {
    return all;
  }
}

// Factors and V come some chunks ahead. kWithOutputs: all factors, not only what changes the state.
template <class C, bool kWithOutputs>
class VectorStream {
  using Factors = std::conditional_t<kWithOutputs, VectorFactors<C>, VectorKeys<C>>;

 public:
  struct Stage {
    alignas(C::kStageAlignment) Factors of_head[C::kHeads];
    alignas(16) typename C::Element v[C::kHeads][C::kChunk * C::kV];

    __device__ VectorFactors<C> const& factors(int head) const { return of_head[head]; }
    __device__ VectorKeys<C> const& keys(int head) const {
      if constexpr (kWithOutputs) {
        return of_head[head].keys;
      } else {
        return of_head[head];
      }
    }
    __device__ typename C::Element const* values(int head) const { return v[head]; }
  };
  struct Storage {
    Stage stages[C::kStages];
  };
  int const chunks;

  __device__ VectorStream(Walk<C> const& walk, VectorParams const&, Storage& storage)
      : chunks(walk.segment.exists() ? walk.chunks() : 0),
        walk_(walk),
        stages_(storage.stages),
        factors_(
            own_run(part_of_factors<Factors>(first_factors(walk, walk.p.sequences.chunk, chunks)))),
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
    C::let_products_see_writes();
    __syncthreads();
    load();
    return stages_[C::of_warp(turn(stage_))];
  }

 private:
  static constexpr int kStages = C::kStages;

  Walk<C> const& walk_;
  Stage* const stages_;
  uint128_t const* factors_;  // this thread's first run of those of the next chunk to be loaded
  WalkTiles<C, C::kV> values_;
  int loaded_ = 0;  // chunks
  int loading_ = 0, stage_ = 0;

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
          copy(factors_ + of * kOfHead, own_run(stage.of_head[of]));
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
