// Stands in for csrc/sm90/cluster.h.
#pragma once

#include "hopper/block_copies.h"
#include "sm90/pipeline.h"

namespace flash::sm90 {

inline void copy_to_block(uint32_t rank, void const* from, void* to, uint32_t bytes,
                          Barrier& full) {
  simt::block_copies().start(rank, from, to, bytes, &full);
}

}  // namespace flash::sm90
