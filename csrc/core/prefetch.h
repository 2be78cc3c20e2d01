// Prefetches the block table to L2 before it is known which of its entries are wanted.
#pragma once

#include "params/seqlens.h"

namespace flash {

// Fetches the 128 bytes around the address, which has to be mapped.
__device__ inline void prefetch_to_l2([[maybe_unused]] void const* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Called by threads that have nothing to do yet. Each thread of a launch fetches one line; the rest
// of a table with room for very long sequences is read when it is wanted.
__device__ inline void prefetch_table(Pages const& pages, int batch, int64_t thread) {
  constexpr int kLine = 128 / sizeof(int);
  int64_t const entries = (batch - 1) * pages.table_stride + pages.per_sequence;
  if (pages.table && thread * kLine < entries) {
    prefetch_to_l2(pages.table + thread * kLine);
  }
}

}  // namespace flash
