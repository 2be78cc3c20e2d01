// CUtensorMap as the emulated TMA unit reads it, and the driver's rules for making one.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "shared_memory.h"

namespace simt {

// The 128 opaque bytes. Unused dimensions have size and box 1.
struct TensorMap {
  static constexpr int kMaxRank = 5;
  static constexpr uint32_t kMagic = 0x746d6170;

  uint32_t magic;
  uint8_t rank;
  uint8_t swizzle_bytes;  // the span in which 16-byte chunks change places; 0: none
  uint8_t element_bytes;
  uint8_t type;  // CUtensorMapDataType
  char* address;
  int64_t stride[kMaxRank];  // bytes
  uint32_t size[kMaxRank];   // elements
  uint16_t box[kMaxRank];    // elements

  // A row of the box, which is what follows another in shared memory.
  int row_bytes() const { return box[0] * element_bytes; }
  int rows() const { return box[1] * box[2] * box[3] * box[4]; }
  int box_bytes() const { return row_bytes() * rows(); }

  static TensorMap const& at(void const* pointer) {
    auto const& map = *static_cast<TensorMap const*>(pointer);
    expect(reinterpret_cast<uintptr_t>(pointer) % 64 == 0, "a tensor map is not 64-byte aligned");
    expect(map.magic == kMagic, "this is no tensor map");
    return map;
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// Where a 16-byte chunk of an unswizzled box lies: bits 4.. of the address are changed by bits 7..
inline uint32_t swizzled(uint32_t address, int span_bytes) {
  uint32_t const mask = span_bytes ? span_bytes / 16 - 1 : 0;
  return address ^ (address >> 7 & mask) << 4;
}

inline int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    default:
      return 0;
  }
}

// cuTensorMapEncodeTiled: what the driver refuses is refused here. What it accepts and this unit
// does not know is thrown.
inline CUresult encode_tiled(CUtensorMap* target, CUtensorMapDataType type, cuuint32_t rank,
                             void* address, cuuint64_t const* sizes, cuuint64_t const* strides,
                             cuuint32_t const* box, cuuint32_t const* element_strides,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B || bytes_of(type) == 0) {
    throw std::invalid_argument("a kind of tensor map that is not emulated");
  }
  if (rank < 1 || rank > TensorMap::kMaxRank || reinterpret_cast<uintptr_t>(target) % 64 != 0 ||
      reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.rank = rank;
  map.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  map.element_bytes = bytes_of(type);
  map.type = type;
  map.address = static_cast<char*>(address);
  map.stride[0] = map.element_bytes;
  std::fill(map.size, std::end(map.size), 1);
  std::fill(map.box, std::end(map.box), 1);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > (1ull << 32) || box[i] == 0 || box[i] > 256 ||
        element_strides[i] == 0 || element_strides[i] > 8) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (element_strides[i] != 1) {
      throw std::invalid_argument("element strides of tensor maps are not emulated");
    }
    map.size[i] = static_cast<uint32_t>(std::min<cuuint64_t>(sizes[i], 0xffffffff));
    map.box[i] = box[i];
    if (i > 0) {
      if (strides[i - 1] % 16 != 0 || strides[i - 1] >= (1ull << 40)) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      map.stride[i] = strides[i - 1];
    }
  }
  if (map.row_bytes() % 16 != 0 || (map.swizzle_bytes && map.row_bytes() > map.swizzle_bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (map.swizzle_bytes && map.row_bytes() < map.swizzle_bytes) {
    throw std::invalid_argument("a box narrower than its swizzle is not emulated");
  }
  std::memset(target, 0, sizeof(*target));
  std::memcpy(target, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace simt
