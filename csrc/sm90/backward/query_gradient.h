// dQ: every KV block adds its part to a sum in fp32, or the only KV block stores dQ.
#pragma once

#include "sm90/backward/dq_semaphore.h"
#include "sm90/backward/store.h"

namespace flash::sm90::backward {

// Adds to four sums without their results, so that no thread waits for them.
__device__ inline void add_to(float* sum, float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(sum, a);
  atomicAdd(sum + 1, b);
  atomicAdd(sum + 2, c);
  atomicAdd(sum + 3, d);
#endif
}

// Reads four sums, after all additions to them and not from L1. Only this thread has added to
// them, or the dQ semaphore has let it pass.
__device__ inline float4 read_sums(float const* sum) {
#if defined(__CUDA_ARCH__)
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(sum)
               : "memory");
  return x;
#else
  return *reinterpret_cast<float4 const*>(sum);
#endif
}

template <class Config>
struct QueryGradient {
  using Mma = typename Config::MmaQuery;
  using Fragment = decltype(partition_fragment_C(
      Mma{}, Shape<Int<kWarpgroupRows>, Int<Config::kQueryColumns>>{}));

  BackwardArgs const& args;
  DqSemaphoreStorage& semaphore;
  KeyBlock<Config> const& block;
  int warpgroup;
  int thread;

  // The first row and column of the fragment, in (kBlockM, kHeadDim).
  __device__ static int row_begin(int warpgroup) {
    return Config::kShareRows ? warpgroup * kWarpgroupRows : 0;
  }
  __device__ static int column_begin(int warpgroup) {
    constexpr int kStep = (Config::kHeadDim - Config::kQueryColumns) / (Config::kConsumers - 1);
    return Config::kShareRows ? 0 : warpgroup * kStep;
  }

  // Adds the iteration-th iteration's dQ to the sums, which lie in the order of the accumulators:
  // (kBlockM / 64, kHeadDim / 8 eights of columns, 128 threads, 4). A warp's addition is one run of
  // 512 bytes.
  __device__ __forceinline__ void add(Fragment const& dq, int64_t row_block,
                                      uint32_t iteration) const {
    BwdParams const& p = args.params;
    if (p.workspace.dq_semaphores) {
      semaphore.begin(iteration);
    }
    add_all(dq, sums_of(row_block));
    if (p.workspace.dq_semaphores) {
      semaphore.end(iteration);
    }
  }

  // Does what the iteration's action says. KV-persistent, this thread alone adds to its sums, one
  // KV block after the other; with ordered dQ it waits for the dQ semaphore.
  __device__ __forceinline__ void leave(Fragment& dq, DqIteration const& rows,
                                        uint32_t iteration) const {
    float* const sums = sums_of(rows.sums);
    DqAction const action = rows.action;
    if constexpr (Config::kOrderedDq) {
      semaphore.begin(iteration);
    }
    if (action == DqAction::Add) {
      add_all(dq, sums);
    } else if (action == DqAction::Put) {
      put(dq, sums);
    } else if (action != DqAction::Nothing) {
      if (action == DqAction::Finish) {
        take(dq, sums);
      }
      store(dq, block.head_begin + rows.head, rows.m_block);
    }
    if constexpr (Config::kOrderedDq) {
      semaphore.end(iteration);
    }
  }

  // Stores dQ where the block holds all keys of its sequence; rows that it does not reach are zero
  // already.
  __device__ __forceinline__ void store(Fragment& dq, int64_t row_block) const {
    store(dq, block.head_of(row_block), block.m_block_of(row_block));
  }

 private:
  __device__ float* sums_of(int64_t row_block) const {
    return args.params.workspace.dq + row_block * (Config::kBlockM * Config::kHeadDim) +
           (row_begin(warpgroup) * Config::kHeadDim + column_begin(warpgroup) * kWarpgroupRows) +
           thread * 4;
  }

  __device__ __forceinline__ void add_all(Fragment const& dq, float* sum) const {
#pragma unroll
    for (int i = 0; i < size(dq); i += 4) {
      if (adds(i / 4)) {
        add_to(sum + i * kWarpgroup, dq(i), dq(i + 1), dq(i + 2), dq(i + 3));
      }
    }
  }

  __device__ __forceinline__ void put(Fragment const& dq, float* sum) const {
#pragma unroll
    for (int i = 0; i < size(dq); i += 4) {
      if (adds(i / 4)) {
        *reinterpret_cast<float4*>(sum + i * kWarpgroup) = {dq(i), dq(i + 1), dq(i + 2), dq(i + 3)};
      }
    }
  }

  // Adds the sums to dq; kTogether loads are on their way before the first is used.
  __device__ __forceinline__ void take(Fragment& dq, float const* sum) const {
    constexpr int kTogether = 4;
    static_assert(decltype(size(dq))::value % (4 * kTogether) == 0);
#pragma unroll
    for (int first = 0; first < size(dq); first += 4 * kTogether) {
      float4 x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        x[i] = float4{0.f, 0.f, 0.f, 0.f};
        if (adds(first / 4 + i)) {
          x[i] = read_sums(sum + (first + 4 * i) * kWarpgroup);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        int const at = first + 4 * i;
        dq(at) += x[i].x;
        dq(at + 1) += x[i].y;
        dq(at + 2) += x[i].z;
        dq(at + 3) += x[i].w;
      }
    }
  }

  // head: among all query heads
  __device__ __forceinline__ void store(Fragment& dq, int head, int m_block) const {
    using Element = typename Config::Element;
    BwdParams const& p = args.params;
    int const row = m_block * Config::kBlockM + row_begin(warpgroup);
    int const column = column_begin(warpgroup);
    Element* const rows = static_cast<Element*>(p.dq.ptr) +
                          p.dq.offset(block.tile.batch, block.row_q + row, head) + column;
    scale(dq, block.dq_scale);
    Extent const extent{block.seqlen_q - row, p.head_dim - column};
    auto const wanted = [&](int eight) { return !Config::kOrdersDq || adds(eight); };
    if constexpr (Config::kWideQueryRows) {
      store_wide_rows<Element>(dq, rows, p.dq.row_stride, extent, thread, wanted);
    } else {
      store_rows<Element>(dq, rows, p.dq.row_stride, extent, thread, wanted);
    }
  }

  // Whether this warpgroup adds eight columns: each adds half of the columns that both compute.
  __device__ bool adds(int eight) const {
    constexpr int kOwn = Config::kHeadDim / Config::kConsumers / 8;
    static_assert(kOwn % 2 == 0);  // pairs of eights are stored
    if constexpr (Config::kShareRows || Config::kQueryColumns / 8 == kOwn) {
      return true;
    }
    return warpgroup == 0 ? eight < kOwn : eight >= Config::kQueryColumns / 8 - kOwn;
  }
};

}  // namespace flash::sm90::backward
