// Marks a function that runs on the device and, for the unit tests, on the host.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline
#endif
