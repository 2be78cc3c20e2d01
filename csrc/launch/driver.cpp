#include "launch/driver.h"

namespace flash {

void* driver_function(char const* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  FLASH_CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found),
                   name);
#else
  FLASH_CHECK_CUDA(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found), name);
#endif
  if (found != cudaDriverEntryPointSuccess || !entry) {
    throw std::runtime_error(
        concat("flash_attn: the driver has no ", name, "; CUDA 12.0 or newer has it"));
  }
  return entry;
}

char const* error_name(CUresult status) {
  static auto const name_of =
      reinterpret_cast<decltype(&cuGetErrorName)>(driver_function("cuGetErrorName"));
  char const* name = nullptr;
  return name_of(status, &name) == CUDA_SUCCESS ? name : "an unknown CUDA error";
}

}  // namespace flash
