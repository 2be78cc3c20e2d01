#include "sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <array>

#include "launch/device.h"
#include "launch/error.h"

namespace flash::sm90 {
namespace {

constexpr int kElementBytes = 2;

// A function of the driver that CUDA 12.0 and newer have. It is reached through the runtime, so
// that the library does not link against the driver and loads without it.
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

// "CUDA_ERROR_INVALID_VALUE" and so on.
char const* error_name(CUresult status) {
  static auto const name_of =
      reinterpret_cast<decltype(&cuGetErrorName)>(driver_function("cuGetErrorName"));
  char const* name = nullptr;
  return name_of(status, &name) == CUDA_SUCCESS ? name : "an unknown CUDA error";
}

template <class... Parts>
void check_driver(CUresult status, Parts const&... message) {
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(concat("flash_attn: ", error_name(status), ": ", message...));
  }
}

// Calls cuTensorMapEncodeTiled. Unlike the runtime's functions, it does not bind the device's
// context to a thread that has none. A thread has none if it has made no call yet (because the
// allocator had memory at hand and the device was the current one), or if its context was taken
// away.
template <class... Args>
CUresult encode_tiled(Args... args) {
  static auto const encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
      driver_function("cuTensorMapEncodeTiled"));
  CUresult const status = encode(args...);
  if (status != CUDA_ERROR_INVALID_CONTEXT) {
    return status;
  }
  // cudaSetDevice is allowed in a capture, too.
  FLASH_CHECK_CUDA(cudaSetDevice(current_device().index), "cuTensorMapEncodeTiled");
  return encode(args...);
}

// One of a map's five dimensions, columns first: how many elements it has, how far apart they are,
// and how many of them a box has.
struct Dimension {
  int64_t size;
  int64_t stride;  // bytes
  int64_t box;
};
using Dimensions = std::array<Dimension, 5>;

constexpr CUtensorMapSwizzle swizzle_of(int box_columns) {
  return box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
         : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                             : CU_TENSOR_MAP_SWIZZLE_32B;
}

CUtensorMap encode(TensorMapRequest const& r, Dimensions const& dimensions) {
  std::array<cuuint64_t, 5> sizes{};
  std::array<cuuint64_t, 4> strides{};  // of all but the columns
  std::array<cuuint32_t, 5> box{};
  std::array<cuuint32_t, 5> const element_strides{1, 1, 1, 1, 1};
  // The stride of a dimension of size 1 is never used but has to be one that the driver takes.
  int64_t const any_stride = (r.columns + 7) / 8 * 8 * kElementBytes;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    auto const& d = dimensions[i];
    sizes[i] = static_cast<cuuint64_t>(d.size);
    box[i] = static_cast<cuuint32_t>(d.box);
    if (i > 0) {
      strides[i - 1] = static_cast<cuuint64_t>(d.size > 1 ? d.stride : any_stride);
    }
  }
  CUtensorMap map{};
  CUresult const status = encode_tiled(
      // Bits are only copied, so both dtypes look the same.
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(r.view.ptr), sizes.data(),
      strides.data(), box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_of(r.box_columns),
      // 256 bytes take 5 to 7% longer where rows begin at odd multiples of 16 bytes (d 72, 104,
      // 120).
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_driver(status, "no TMA descriptor for a tensor of ", r.batch, " x ", r.rows, " x ", r.heads,
               " x ", r.columns, " with strides ", r.view.batch_stride, ", ", r.view.row_stride,
               ", ", r.view.head_stride);
  return map;
}

// A tensor without elements is never read, and may have any strides: its map need only be one that
// the driver takes.
TensorMapRequest with_elements(TensorMapRequest r) {
  if (!r.has_elements()) {
    r.batch = 1;
    r.rows = 8;  // so that there are eight
    r.heads = r.group;
    r.view.head_stride = (r.columns + 7) / 8 * 8;  // whole chunks of 16 bytes
    r.view.row_stride = r.view.batch_stride = r.view.head_stride * r.group;
  }
  return r;
}

}  // namespace

TensorMap make_tensor_map(TensorMapRequest const& request) {
  TensorMapRequest const r = with_elements(request);
  int64_t const row_bytes = (r.rows > 1 ? r.view.row_stride : r.columns) * kElementBytes;
  int64_t const head_bytes = r.view.head_stride * kElementBytes;
  // An expanded dimension becomes one of size 1.
  bool const has_batch = r.batch > 1 && r.view.batch_stride != 0;
  bool const has_heads = r.heads > r.group && r.view.head_stride != 0;
  Dimension const columns{r.columns, kElementBytes, r.box_columns};
  Dimension const heads{has_heads ? r.heads / r.group : 1, head_bytes * r.group, 1};
  if (r.boxes == Boxes::EndWithTensor) {
    Dimension const group{r.group, head_bytes, r.group};
    Dimension const rows{r.rows, row_bytes, r.box_rows};
    Dimension const batch{has_batch ? r.batch : 1, r.view.batch_stride * kElementBytes, 1};
    return {encode(r, {columns, group, heads, rows, batch}), r.boxes, has_heads, has_batch};
  }
  if (r.boxes == Boxes::OfEights) {
    constexpr int kRows = 8, kRunColumns = 64;
    int64_t const apart = has_batch ? r.view.batch_stride / r.view.row_stride : 0,
                  runs = r.columns / kRunColumns;
    Dimension const run{kRunColumns, kElementBytes, kRunColumns};
    Dimension const rows{kRows, row_bytes, kRows};
    Dimension const all_runs{runs, kRunColumns * kElementBytes, runs};
    Dimension const eights{((r.batch - 1) * apart + r.rows) / kRows, kRows * row_bytes,
                           r.box_rows / kRows};
    return {encode(r, {run, rows, all_runs, eights, heads}), r.boxes, has_heads,
            static_cast<int>(apart)};
  }
  // If batch entries have one row each, the entries serve as rows.
  bool const entries_are_rows = has_batch && r.rows <= 1;
  int64_t const rows_apart = !has_batch         ? 0
                             : entries_are_rows ? 1
                                                : r.view.batch_stride / r.view.row_stride;
  int64_t const step = entries_are_rows ? r.view.batch_stride * kElementBytes : row_bytes;
  Dimension const clip{kClip, step, r.box_rows};
  Dimension const rows{(r.batch - 1) * rows_apart + r.rows + 1, step, 1};
  constexpr int64_t kWrap = int64_t{1} << 34;  // kClip times this is 2^64
  Dimension const back{int64_t{kClip} + 1, kWrap - step, 1};
  return {encode(r, {columns, clip, heads, rows, back}), r.boxes, has_heads,
          static_cast<int>(rows_apart)};
}

}  // namespace flash::sm90
