// Errors on the host are thrown, never printed: a wrong argument is a ValueError in Python, a
// failure in CUDA a RuntimeError with the error's name.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "launch/concat.h"

namespace flash {

// Python turns messages with this prefix into NotImplementedError.
inline constexpr char kNotImplemented[] = "flash_attn: not implemented: ";

// Python turns messages with this prefix into torch.OutOfMemoryError.
inline constexpr char kOutOfMemory[] = "CUDA out of memory.";

template <class... Parts>
void check(bool condition, Parts const&... message) {
  if (!condition) {
    throw std::invalid_argument(concat("flash_attn: ", message...));
  }
}

inline void check_cuda(cudaError_t status, char const* what, char const* file, int line) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears the error, which the runtime would return to the next caller
    throw std::runtime_error(concat("flash_attn: ", cudaGetErrorName(status), ": ",
                                    cudaGetErrorString(status), " in ", what, " (", file, ":", line,
                                    ")"));
  }
}

}  // namespace flash

#define FLASH_CHECK_CUDA(call, what) ::flash::check_cuda((call), (what), __FILE__, __LINE__)
