// How many CTAs of a kernel, or clusters of them, a GPU runs at a time.
#pragma once

#include <algorithm>

#include "params/decode_params.h"

namespace flash::plan {

// What a CTA takes.
struct CtaSize {
  int warps;
  int smem_bytes;
  int cluster;  // CTAs of a cluster
};

// What a GPU has.
struct GpuSize {
  int sm_count;
  int smem_per_block;  // the most shared memory of a CTA
};

// The CTAs that the shared memory of an SM holds. It has 1 KiB more than a CTA can get, and uses 1
// KiB per CTA.
constexpr int ctas_by_shared_memory(CtaSize const& cta, GpuSize const& gpu) {
  constexpr int kKiB = 1024;
  return (gpu.smem_per_block + kKiB) / (cta.smem_bytes + kKiB);
}

// Clusters of `cluster` CTAs on a GPU that runs `ctas` CTAs. The parts of a GPU may have no
// multiple of a cluster's SMs: an H200's 132 run 30 clusters of 4, 15 of 8, 7 of 16.
constexpr int clusters_at_a_time(int ctas, int cluster) {
  int const reached = cluster > 2 ? ctas * 10 / 11 : ctas;
  return std::max(reached / cluster, 1);
}

// Threads of backward kernels have 255 registers, so an SM's 64K are those of 8 warps.
constexpr int resident_backward(CtaSize const& cta, GpuSize const& gpu) {
  constexpr int kWarps = 8;
  int const ctas = std::min(kWarps / cta.warps, ctas_by_shared_memory(cta, gpu));
  return clusters_at_a_time(gpu.sm_count * std::max(ctas, 1), cta.cluster);
}

// A CTA of Hopper's forward has an SM for itself.
constexpr int resident_forward(bool hopper, CtaSize const& cta, GpuSize const& gpu) {
  int const ctas = hopper ? 1 : std::max(ctas_by_shared_memory(cta, gpu), 1);
  return clusters_at_a_time(gpu.sm_count * ctas, cta.cluster);
}

constexpr int resident_decode(CtaSize const& cta, GpuSize const& gpu) {
  return gpu.sm_count * std::clamp(ctas_by_shared_memory(cta, gpu), 1, kMostDecodeBlocks);
}

}  // namespace flash::plan
