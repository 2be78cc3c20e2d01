#include "sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "host/error.h"

namespace flash::sm90 {
namespace {

constexpr int kElementBytes = 2;

// Through the runtime, so that the library does not link against the driver's and loads without it.
auto encoder() {
  static auto const function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FLASH_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                      cudaEnableDefault, &found),
                     "cuTensorMapEncodeTiled");
    check(found == cudaDriverEntryPointSuccess && entry,
          "the driver has no cuTensorMapEncodeTiled; CUDA 12.0 or newer has it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

}  // namespace

TensorMap make_tensor_map(TensorMapRequest const& r) {
  TensorMap result{};
  result.head_step = r.heads > 1 && r.head_stride != 0;
  result.batch_step = r.batch > 1 && r.batch_stride != 0;
  // An expanded dimension becomes one of size 1. The stride of such a dimension is never used but
  // has to be one that the driver takes.
  int64_t const any_stride = (r.columns + 7) / 8 * 8;
  auto const bytes = [&](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>((size > 1 ? stride : any_stride) * kElementBytes);
  };
  int64_t const heads = result.head_step ? r.heads : 1, batch = result.batch_step ? r.batch : 1;
  // A tensor without rows is never read; its map need only be one that the driver takes.
  int64_t const rows = std::max<int64_t>(r.rows, 1);
  std::array const sizes{static_cast<cuuint64_t>(r.columns), static_cast<cuuint64_t>(rows),
                         static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  std::array const strides{bytes(r.row_stride, rows), bytes(r.head_stride, heads),
                           bytes(r.batch_stride, batch)};
  std::array const box{static_cast<cuuint32_t>(r.box_columns), static_cast<cuuint32_t>(r.box_rows),
                       cuuint32_t{1}, cuuint32_t{1}};
  std::array<cuuint32_t, 4> const element_strides{1, 1, 1, 1};
  CUresult const status = encoder()(
      // Bits are only copied, so both dtypes look the same.
      &result.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(r.ptr), sizes.data(),
      strides.data(), box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      r.box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, "no TMA descriptor (CUDA error ", int{status}, ") for a tensor of ",
        r.batch, " x ", r.rows, " x ", r.heads, " x ", r.columns, " with strides ", r.batch_stride,
        ", ", r.row_stride, ", ", r.head_stride);
  return result;
}

}  // namespace flash::sm90
