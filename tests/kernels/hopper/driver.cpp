// What kernels' host code asks of the CUDA runtime: streams, devices, and the driver's tensor maps.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "tensor_map.h"

namespace {

// Each thread has its own. On a GPU launches bind it as well.
thread_local bool has_context = false;

CUresult broken = CUDA_SUCCESS;

// What the library asked the runtime for by itself: its counters.
std::vector<std::vector<uint32_t>> memory;

template <class... Args>
CUresult encode_in_context(Args... args) {
  if (!has_context) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  return broken != CUDA_SUCCESS ? broken : simt::encode_tiled(args...);
}

CUresult error_name(CUresult error, char const** name) {
  *name = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "another error";
  return CUDA_SUCCESS;
}

void* driver_function(std::string_view name) {
  if (name == "cuTensorMapEncodeTiled") {
    decltype(&cuTensorMapEncodeTiled) const encode = &encode_in_context;
    return reinterpret_cast<void*>(encode);
  }
  return name == "cuGetErrorName" ? reinterpret_cast<void*>(&error_name) : nullptr;
}

}  // namespace

extern "C" {

// Every tensor map from here on fails with this error; 0 ends it.
__attribute__((visibility("default"))) void break_driver(int error) {
  broken = static_cast<CUresult>(error);
}

// Whether all counters are zero, as every launch has to leave them; then they are, in any case.
bool take_clean_counters() {
  bool clean = true;
  for (std::vector<uint32_t>& words : memory) {
    for (uint32_t& word : words) {
      clean = clean && word == 0;
      word = 0;
    }
  }
  return clean;
}

cudaError_t cudaMalloc(void** target, size_t bytes) {
  constexpr uint32_t kNotZero = 0xdeadbeef;
  *target = memory.emplace_back(bytes / sizeof(uint32_t), kNotZero).data();
  return cudaSuccess;
}

// A kernel's array has memory of the emulation's, too, which is so large that it will do.
cudaError_t cudaGetSymbolAddress(void** target, void const*) {
  constexpr size_t kMost = 1 << 16;
  *target = memory.emplace_back(kMost).data();
  return cudaSuccess;
}

cudaError_t cudaGetSymbolSize(size_t* bytes, void const*) {
  *bytes = memory.back().size() * sizeof(uint32_t);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = driver_function(symbol);
  if (status) {
    *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
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
