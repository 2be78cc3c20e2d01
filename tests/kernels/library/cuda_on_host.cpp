// What csrc asks of CUDA and of torch's CUDA part, answered for tensors in the host's memory. The
// linker prefers these to libtorch's own.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "host/device.h"

namespace {
flash::DeviceInfo device{0, 80, 40 << 20, 166912, 4};
}

namespace flash {
DeviceInfo const& current_device() { return device; }
}  // namespace flash

extern "C" {

// Which GPU the kernels take themselves to run on.
__attribute__((visibility("default"))) void use_device(int sm, int smem_per_block, int sm_count) {
  device.sm = sm;
  device.smem_per_block = smem_per_block;
  device.sm_count = sm_count;
}

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t) { return "no CUDA"; }
char const* cudaGetErrorString(cudaError_t) { return "no CUDA"; }

}  // extern "C"
