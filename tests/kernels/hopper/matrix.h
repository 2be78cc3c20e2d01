// Operands of wgmma: matrix descriptors of shared memory (PTX manual, "Asynchronous Warpgroup Level
// Matrix Shared Memory Layout") and the arithmetic.
#pragma once

#include <algorithm>
#include <vector>

#include "tensor_core.h"
#include "tensor_map.h"

namespace simt {

constexpr int kDepth = 16;  // k of one wgmma, 16-bit elements or pairs of codes of 8 bits

// ((8, n), 2) or ((span, n), (8, 2)) chunks of 16 bytes with the strides that the descriptor gives.
struct MatrixDescriptor {
  uint32_t start;
  uint32_t leading;     // bytes
  uint32_t stride;      // bytes
  uint32_t span_bytes;  // of the swizzle; 0: none

  explicit MatrixDescriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4),
        leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4) {
    constexpr uint32_t kSpans[4] = {0, 128, 64, 32};
    span_bytes = kSpans[bits >> 62];
    expect((bits >> 49 & 7) == 0, "matrix descriptors with a base offset are not emulated");
  }

  // A chunk holds rows 8 i .. 8 i + 7 of the operand's M or N ("group") and one k, if the operand
  // is contiguous along them; else one row and 8 k's.
  uint32_t chunk_along_mn(int group, int k) const {
    uint32_t const width = span_bytes / 16;
    if (width == 0) {
      return start + group * stride + k % 8 * 16 + k / 8 * leading;
    }
    uint32_t const address =
        start + group % width * 16 + group / width * leading + k % 8 * span_bytes + k / 8 * stride;
    return swizzled(address, span_bytes);
  }
  uint32_t chunk_along_k(int row, int half) const {
    if (span_bytes == 0) {
      return start + row % 8 * 16 + row / 8 * stride + half * leading;
    }
    return swizzled(start + row % 8 * span_bytes + row / 8 * stride + half * 16, span_bytes);
  }
};

// [kDepth][rows] of an operand in shared memory
inline std::vector<uint16_t> read_matrix(uint64_t descriptor, bool along_k, int rows) {
  MatrixDescriptor const matrix(descriptor);
  std::vector<uint16_t> elements(kDepth * rows);
  auto const chunk = [](uint32_t address) {
    expect_fenced(address, 16, "a wgmma operand");
    return reinterpret_cast<uint16_t const*>(smem_pointer(address, 16));
  };
  if (along_k) {
    for (int row = 0; row < rows; ++row) {
      for (int half = 0; half < 2; ++half) {
        uint16_t const* const from = chunk(matrix.chunk_along_k(row, half));
        for (int k = 0; k < 8; ++k) {
          elements[(half * 8 + k) * rows + row] = from[k];
        }
      }
    }
  } else {
    for (int k = 0; k < kDepth; ++k) {
      for (int group = 0; group < rows / 8; ++group) {
        std::copy_n(chunk(matrix.chunk_along_mn(group, k)), 8, &elements[k * rows + group * 8]);
      }
    }
  }
  return elements;
}

// odd: of pairs of codes, the second ones.
std::vector<float> to_float(std::vector<uint16_t> const& elements, Type type, bool odd = false);

// c [64][n] += a [kDepth][64] transposed · b [kDepth][n]
void multiply_add(float* c, float const* a, float const* b, int n);

}  // namespace simt
