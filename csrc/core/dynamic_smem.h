#pragma once

namespace flash {

// The shared memory that a launch asked for. 1024 bytes are what the widest TMA swizzle repeats at.
__device__ inline char* dynamic_smem() {
  extern __shared__ __align__(1024) char launch_smem[];
  return launch_smem;
}

}  // namespace flash
