#include "api/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>

// Weak, so that the library also loads, and lists its kernels, under a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace flash::api {
namespace {

int64_t bytes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    default:
      return 2;
  }
}

// torch's number of the dtype. scalar_type() compares it with torch's numbers one after another,
// which takes half a microsecond of a call.
int32_t dtype_code(Tensor const& t) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

void check_columns(Tensor const& t, char const* name) {
  int64_t const dims = t.dim();
  require(dims == 3 || dims == 4, name, "dims", dims, "3 or 4");
  require(t.numel() == 0 || t.stride(dims - 1) == 1, name, "unit_stride", t.stride(dims - 1));
}

// The allocator's shim prints the error but does not return it. If CUDA itself has failed, that is
// the reason, and the query here throws it.
[[noreturn]] void throw_out_of_memory(int64_t bytes) {
  size_t free = 0, total = 0;
  FLASH_CHECK_CUDA(cudaMemGetInfo(&free, &total), "allocation");
  throw std::runtime_error(concat(kOutOfMemory, " flash_attn asked for ", bytes, " bytes; of ",
                                  total, " on the GPU ", free, " are free"));
}

}  // namespace

char const* dtype_name(Tensor const& t, char const* name) {
  ScalarType const dtype = t.scalar_type();
  require(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name, "dtype", DtypeOf{t},
          "BFloat16 or Half");
  return dtype == ScalarType::BFloat16 ? "bf16" : "fp16";
}

Tensor empty(Tensor const& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  // Calls the allocator's shim: the dispatcher would cost a microsecond more.
  constexpr size_t kMaxDims = 4;
  check(sizes.size() <= kMaxDims, "outputs have at most ", kMaxDims, " dimensions");
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  int32_t const code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(),
                               code, aoti_torch_device_type_cuda(), like.get_device_index(),
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw_out_of_memory(stride * bytes_of(dtype));
  }
  return Tensor(handle);
}

Scratch::Scratch(Tensor const& like, int64_t entries, ScalarType dtype) {
  if (entries > 0) {
    memory_ = empty(like, {entries}, dtype);
  }
}

cudaStream_t current_stream(Tensor const& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_on_device_of(Tensor const& t, char const* name, Tensor const& q) {
  require(t.is_cuda() && t.get_device_index() == q.get_device_index(), name, "device");
}

bool has_codes(Tensor const& t) {
  static int32_t const codes = aoti_torch_dtype_float8_e4m3fn();
  return dtype_code(t) == codes;
}

void check_codes(Tensor const& t, char const* name, Tensor const& q) {
  check_on_device_of(t, name, q);
  require(has_codes(t), name, "dtype", DtypeOf{t}, "Float8_e4m3fn");
  check_columns(t, name);
}

bool has_whole_chunks(Tensor const& t) {
  int64_t const dims = t.dim(), bytes = t.element_size();
  bool whole =
      t.size(dims - 1) * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < dims - 1; ++i) {
    whole = whole && (t.size(i) == 1 || t.stride(i) * bytes % 16 == 0);
  }
  return whole || t.numel() == 0;
}

void check_rows(Tensor const& t, char const* name, Tensor const& q) {
  check_on_device_of(t, name, q);
  if (dtype_code(t) != dtype_code(q)) {
    require(false, name, "dtype", DtypeOf{t}, DtypeOf{q});
  }
  check_columns(t, name);
}

void check_operand(Tensor const& t, char const* name, Tensor const& q) {
  check_rows(t, name, q);
  if (t.numel() == 0) {
    return;
  }
  int64_t const dims = t.dim(), chunk = 16 / static_cast<int64_t>(t.element_size());
  require(t.size(dims - 1) % chunk == 0, name, "head_dim", t.size(dims - 1), chunk);
  auto const address = reinterpret_cast<uintptr_t>(t.data_ptr());
  require(address != 0, name, "memory");
  require(address % 16 == 0, name, "address", address);
  for (int64_t i = 0; i < dims - 1; ++i) {
    require(t.size(i) == 1 || t.stride(i) % chunk == 0, name, "stride", t.stride(i), i, chunk);
  }
}

int const* int32_vector(OptionalTensor const& t, char const* name, int64_t size, Tensor const& q) {
  if (!t) {
    return nullptr;
  }
  check_on_device_of(*t, name, q);
  require(t->scalar_type() == ScalarType::Int && t->dim() == 1 && t->size(0) == size &&
              t->is_contiguous(),
          name, "vector", "int32", size);
  return static_cast<int const*>(t->data_ptr());
}

float const* float_vector(Tensor const& t, char const* name, int64_t count, Tensor const& q) {
  check_on_device_of(t, name, q);
  require(t.scalar_type() == ScalarType::Float && t.numel() == count && t.is_contiguous(), name,
          "vector", "fp32", count);
  return static_cast<float const*>(t.data_ptr());
}

}  // namespace flash::api
