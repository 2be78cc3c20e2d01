// CUDA's driver API, reached through the runtime, so that the library does not link against the
// driver and loads without it.
#pragma once

#include <cuda.h>

#include <stdexcept>

#include "launch/error.h"

namespace flash {

// A function of the driver that CUDA 12.0 and newer have.
void* driver_function(char const* name);

// "CUDA_ERROR_INVALID_VALUE" and so on.
char const* error_name(CUresult status);

template <class... Parts>
void check_driver(CUresult status, Parts const&... message) {
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(concat("flash_attn: ", error_name(status), ": ", message...));
  }
}

}  // namespace flash
