#pragma once

namespace flash {

// The launch's dynamic shared memory, aligned to the 1024 bytes after which the widest TMA swizzle
// repeats.
__device__ inline char* dynamic_smem() {
  extern __shared__ __align__(1024) char launch_smem[];
  return launch_smem;
}

}  // namespace flash
