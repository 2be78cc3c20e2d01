// dQ: every KV block adds its part to a sum in fp32, or the only KV block stores dQ.
#pragma once

#include "sm80/backward/key_block.h"

namespace flash::sm80 {

// Adds to a sum without its result, so that no thread waits for it.
__device__ inline void add_to(float* sum, float x) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
#else
  atomicAdd(sum, x);
#endif
}

// This thread's part of the sum for one row block. Sums lie in the order of the accumulators,
// (kQueryGradients, kThreads): a warp's addition is one run of 128 bytes, and none needs a
// predicate. In a deterministic call KV blocks add in their order, by the dQ semaphore: those
// before this one belong to CTAs that were launched before, so waiting for them always ends.
template <class Config>
struct QueryGradient {
  float* sum;
  int* semaphore;  // KV blocks that have added; null: any order
  int before;      // KV blocks that add before this one

  __device__ QueryGradient(BwdParams const& p, KeyBlock<Config> const& block, RowIteration at) {
    int64_t const row_block = block.index(at);
    sum = p.workspace.dq + row_block * (Config::kBlockM * Config::kHeadDim) + threadIdx.x;
    semaphore = p.workspace.dq_semaphores ? p.workspace.dq_semaphores + row_block : nullptr;
    int const first_key = block.mask.begin(at.m_block * Config::kBlockM);
    before = block.tile.m_block - first_key / Config::kBlockN;
  }

  __device__ void wait() const {
    if (!semaphore) {
      return;
    }
    if (threadIdx.x == 0) {
      while (*static_cast<int volatile*>(semaphore) < before) {
        __nanosleep(32);
      }
      __threadfence();
    }
    __syncthreads();
  }

  // pass: which part of the columns dq is.
  template <class Accumulator>
  __device__ __forceinline__ void add(Accumulator const& dq, int pass) const {
    constexpr int kPart = decltype(size(dq))::value;
    static_assert(kPart * Config::kQueryPasses == Config::kQueryGradients);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      add_to(sum + (pass * kPart + i) * Config::kThreads, dq(i));
    }
  }

  __device__ void pass_on() const {
    if (!semaphore) {
      return;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(semaphore, 1);
    }
  }
};

// Stores this thread's part of dQ where the block holds all keys of its sequence; rows that it does
// not reach are zero already.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_query_gradient(BwdParams const& p,
                                                     KeyBlock<Config> const& block, RowIteration at,
                                                     Accumulator const& dq_mma, int pass) {
  using Element = typename Config::Element;
  GridCoord<typename Config::RowGrid> const coord(threadIdx.x);
  Tensor dq = make_tensor(dq_mma.data(), rows_and_columns(dq_mma.layout()));
  int const row_begin = at.m_block * Config::kBlockM;
  Element* const rows =
      static_cast<Element*>(p.dq.ptr) +
      p.dq.offset(block.tile.batch, block.info.row_q + row_begin, block.head_begin + at.head);
  // Read once: as far as the compiler knows, what is stored could be any of these.
  int64_t const stride = p.dq.row_stride;
  int const rows_left = block.info.seqlen_q - row_begin, head_dim = p.head_dim;
  float const scale = block.dq_scale;
#pragma unroll
  for (int r = 0; r < size<0>(dq); ++r) {
    int const row = coord.row(r);
#pragma unroll
    for (int c = 0; c < size<1>(dq); c += 2) {
      int const column = pass * (Config::kHeadDim / Config::kQueryPasses) + coord.col(c);
      if (row < rows_left && column < head_dim) {
        Element* const pair = rows + row * stride + column;
        pair[0] = Element(dq(r, c) * scale);
        pair[1] = Element(dq(r, c + 1) * scale);
      }
    }
  }
}

}  // namespace flash::sm80
