// What kernels' host code asks of the CUDA runtime: streams, and tensor maps.
#include <cuda_runtime.h>

#include <cstdint>
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

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, cudaGraphNode_t const**,
#if CUDART_VERSION >= 13000
                                     cudaGraphEdgeData const**,
#endif
                                     size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// A stream is a number.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}

}  // extern "C"
