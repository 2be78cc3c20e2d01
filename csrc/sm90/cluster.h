// What the thread blocks of a cluster do to each other's shared memory. The tests put a header of
// the same name before this one.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/pipeline.h"

namespace flash::sm90 {

// Asks for a copy of `bytes`, a multiple of 16, from this block's shared memory to `to` in that of
// block `rank` of the cluster, where they count towards `full`. Both are given as they are in this
// block. By one thread; a copy sees what ordinary stores wrote after a fence only.
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
