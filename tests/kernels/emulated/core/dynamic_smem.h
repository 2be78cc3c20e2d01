// Stands in for csrc/core/dynamic_smem.h: the shared memory of the block whose thread is running.
#pragma once

#include "simt.h"

namespace flash {

inline char* dynamic_smem() { return simt::block->smem; }

}  // namespace flash
