// What csrc asks of CUDA and of torch's CUDA part, answered for tensors in the host's memory. The
// linker prefers these to libtorch's own.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "launch/device.h"
#include "launch/sm_margin.h"

namespace {
flash::DeviceInfo device{0, 80, 40 << 20, 166912, 4};
int fewest_sms = INT_MAX;   // of those that calls took the GPU to have
int allocations_left = -1;  // until one fails; none does if negative

// Memory that a kernel did not write holds NaNs of every dtype, not the zeros of fresh pages. Only
// the first part of a large tensor is filled, so that the rest takes up no memory.
void fill_with_nans(AtenTensorHandle tensor) {
  constexpr uint16_t kNan = 0x7fff;
  constexpr int64_t kMost = 32 << 20;  // bytes
  void* begin = nullptr;
  int64_t bytes = 0;
  aoti_torch_get_data_ptr(tensor, &begin);
  aoti_torch_get_storage_size(tensor, &bytes);
  std::fill_n(static_cast<uint16_t*>(begin), std::min(bytes, kMost) / sizeof(kNan), kNan);
}
}  // namespace

namespace flash {
DeviceInfo const& current_device() {
  DeviceInfo const& seen = without_margin(device);
  fewest_sms = std::min(fewest_sms, seen.sm_count);
  return seen;
}
}  // namespace flash

extern "C" {

// Which GPU the kernels take themselves to run on.
__attribute__((visibility("default"))) void use_device(int sm, int smem_per_block, int sm_count) {
  device.sm = sm;
  device.smem_per_block = smem_per_block;
  device.sm_count = sm_count;
}

// The fewest SMs that a call took the GPU to have since this was asked last.
__attribute__((visibility("default"))) int fewest_sms_seen() {
  return std::exchange(fewest_sms, INT_MAX);
}

// How many allocations there is memory for; -1: for all.
__attribute__((visibility("default"))) void allow_allocations(int count) {
  allocations_left = count;
}

AOTITorchError aoti_torch_empty_strided(int64_t dims, int64_t const* sizes, int64_t const* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* tensor) {
  if (allocations_left == 0) {
    return AOTI_TORCH_FAILURE;
  }
  allocations_left -= allocations_left > 0;
  static auto const torchs = reinterpret_cast<decltype(&aoti_torch_empty_strided)>(
      dlsym(RTLD_NEXT, "aoti_torch_empty_strided"));
  AOTITorchError const error =
      torchs(dims, sizes, strides, dtype, device_type, device_index, tensor);
  if (error == AOTI_TORCH_SUCCESS) {
    fill_with_nans(*tensor);
  }
  return error;
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
