// How many CTAs of a kernel a multiprocessor holds.
#pragma once

#include "launch/variant.h"

namespace flash {

// CTAs that fit in shared memory. A multiprocessor has 1 KiB more than a CTA can get, and uses 1
// KiB per CTA.
inline int blocks_by_shared_memory(Variant const& variant, DeviceInfo const& device) {
  constexpr int kKiB = 1024;
  return (device.smem_per_block + kKiB) / (variant.smem_bytes + kKiB);
}

// The least shared memory of a CTA with which a multiprocessor holds at most so many CTAs.
inline int memory_for_at_most(int blocks, DeviceInfo const& device) {
  return device.smem_per_block / (blocks + 1) + 1;
}

}  // namespace flash
