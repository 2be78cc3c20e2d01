// Each head's largest logit, from those that a forward kernel found for its rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/dynamic_smem.h"
#include "core/warp_lanes.h"
#include "params/largest_params.h"

namespace flash::largest {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / WarpLanes::kCount;
// A warp reads a run of a sequence's rows at a time: so many loads of a thread are on their way
// together, because the kernel takes as long as it waits for them.
constexpr int kLoads = 16;
constexpr int kRun = kLoads * WarpLanes::kCount;
constexpr int kSmemBytes = kWarps * sizeof(float);

// NaN is larger than all numbers, as in torch.amax.
__device__ inline float larger(float a, float b) { return b > a || std::isnan(b) ? b : a; }

__device__ inline float largest_of_warp(float x) {
#pragma unroll
  for (int apart = WarpLanes::kCount / 2; apart > 0; apart /= 2) {
    x = larger(x, __shfl_xor_sync(WarpLanes::kAll, x, apart));
  }
  return x;
}

// The largest of a thread's rows of the head.
__device__ inline float largest_of_thread(LargestParams const& p, int head, int warp, int lane) {
  int64_t const runs = (p.length + kRun - 1) / kRun, all_runs = runs * p.batch;
  float largest = -INFINITY;
  for (int64_t run = warp; run < all_runs; run += kWarps) {
    int64_t const batch = run / runs, begin = (run - batch * runs) * kRun;
    float const* const rows = p.rows + (batch * p.heads + head) * p.length;
    float x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int64_t const row = begin + i * WarpLanes::kCount + lane;
      x[i] = row < p.length ? rows[row] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      largest = larger(largest, x[i]);
    }
  }
  return largest;
}

// A CTA has a head.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(__grid_constant__ LargestParams const p) {
  int const head = blockIdx.x;
  int const warp = threadIdx.x / WarpLanes::kCount, lane = threadIdx.x % WarpLanes::kCount;
  auto* const of_warps = reinterpret_cast<float*>(dynamic_smem());
  float const of_warp = largest_of_warp(largest_of_thread(p, head, warp, lane));
  if (lane == 0) {
    of_warps[warp] = of_warp;
  }
  __syncthreads();
  if (warp == 0) {
    static_assert(kWarps == WarpLanes::kCount);
    float const largest = largest_of_warp(of_warps[lane]);
    if (lane == 0) {
      p.out[head] = largest;
    }
  }
}

}  // namespace flash::largest
