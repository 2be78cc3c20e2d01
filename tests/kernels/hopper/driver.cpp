// What kernels' host code asks of the CUDA runtime: streams, devices, and the driver's tensor maps.
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <string_view>

#include "tensor_map.h"

namespace {

// Of each thread. On a GPU launches bind it as well.
thread_local bool has_context = false;

CUresult broken = CUDA_SUCCESS;

struct UserObject {
  void* what;
  cudaHostFn_t destroy;
};
std::multimap<cudaGraph_t, UserObject*> user_objects;  // those that a graph holds

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

// Streams below 0 capture, each for a graph of its own.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     cudaGraphNode_t const**,
#if CUDART_VERSION >= 13000
                                     cudaGraphEdgeData const**,
#endif
                                     size_t*) {
  bool const captures = reinterpret_cast<intptr_t>(stream) < 0;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = reinterpret_cast<uintptr_t>(stream);
  *graph = reinterpret_cast<cudaGraph_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* what, cudaHostFn_t destroy,
                                 unsigned int, unsigned int) {
  *object = reinterpret_cast<cudaUserObject_t>(new UserObject{what, destroy});
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int,
                                      unsigned int) {
  user_objects.emplace(graph, reinterpret_cast<UserObject*>(object));
  return cudaSuccess;
}

// The last copy of the graph that a stream captured for is gone.
__attribute__((visibility("default"))) void end_graph(intptr_t stream) {
  auto const [begin, end] = user_objects.equal_range(reinterpret_cast<cudaGraph_t>(stream));
  for (auto object = begin; object != end; ++object) {
    object->second->destroy(object->second->what);
    delete object->second;
  }
  user_objects.erase(begin, end);
}

// A stream is a number.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}

}  // extern "C"
