#pragma once

// Marks the functions of csrc/core: device code in a kernel, and plain inline functions for the host
// compiler, so that tests/unit can check them without nvcc or a GPU.
#if defined(__CUDACC__)
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline
#endif
