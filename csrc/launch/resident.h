// How many thread blocks of a kernel a multiprocessor holds.
#pragma once

#include "launch/variant.h"

namespace flash {

// By shared memory, of which it has 1 KiB more than a block can get, and takes 1 KiB per block.
inline int blocks_by_shared_memory(Variant const& variant, DeviceInfo const& device) {
  constexpr int kKiB = 1024;
  return (device.smem_per_block + kKiB) / (variant.smem_bytes + kKiB);
}

// Shared memory of a block with which a multiprocessor holds no more than so many of them.
inline int memory_for_at_most(int blocks, DeviceInfo const& device) {
  return device.smem_per_block / (blocks + 1) + 1;
}

}  // namespace flash
