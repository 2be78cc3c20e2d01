// What kernels' host code asks of the CUDA runtime: one stream, and tensor maps.
#include <cuda_runtime.h>

#include <string_view>

#include "tensor_map.h"

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  bool const known = std::string_view(symbol) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&simt::encode_tiled) : nullptr;
  if (status) {
    *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(char const* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) {
  *id = 0;
  return cudaSuccess;
}

}  // extern "C"
