// Copies between the shared memory of a cluster's CTAs. Tests put a header of the same name before
// this one.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/pipeline.h"

namespace flash::sm90 {

// Starts a copy of `bytes`, a multiple of 16, from this CTA's shared memory to `to` in CTA `rank`'s
// of the cluster, where the bytes count towards `full`. `to` and `full` are given as
// addresses in this CTA. One thread calls it; a copy sees what ordinary stores wrote only behind a
// fence.
__device__ inline void copy_to_block(uint32_t rank, void const* from, void* to, uint32_t bytes,
                                     Barrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), rank)),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes),
      "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&full), rank))
      : "memory");
}

}  // namespace flash::sm90
