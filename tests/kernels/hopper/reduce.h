// What a bulk store does with the bytes it finds in global memory.
#pragma once

#include <cuda.h>
#include <cutlass/numeric_types.h>

#include <cstring>
#include <stdexcept>

namespace simt {

using Reduce = void (*)(char* target, char const* from, int bytes);

inline void overwrite(char* target, char const* from, int bytes) {
  std::memcpy(target, from, bytes);
}

template <class Element>
void add(char* target, char const* from, int bytes) {
  for (int i = 0; i < bytes; i += sizeof(Element)) {
    Element sum, more;
    std::memcpy(&sum, target + i, sizeof(Element));
    std::memcpy(&more, from + i, sizeof(Element));
    sum = Element(sum + more);
    std::memcpy(target + i, &sum, sizeof(Element));
  }
}

inline Reduce add_of(int type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return add<float>;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      return add<cutlass::half_t>;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return add<cutlass::bfloat16_t>;
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
      return add<int32_t>;
    default:
      throw std::invalid_argument("adding this type in global memory is not emulated");
  }
}

}  // namespace simt
