// CuTe's header, but for stmatrix.
#pragma once

#define SM90_U32x1_STSM_N SM90_U32x1_STSM_N_gpu
#define SM90_U32x2_STSM_N SM90_U32x2_STSM_N_gpu
#define SM90_U32x4_STSM_N SM90_U32x4_STSM_N_gpu
#define SM90_U16x2_STSM_T SM90_U16x2_STSM_T_gpu
#define SM90_U16x4_STSM_T SM90_U16x4_STSM_T_gpu
#define SM90_U16x8_STSM_T SM90_U16x8_STSM_T_gpu
#include_next <cute/arch/copy_sm90.hpp>
#undef SM90_U32x1_STSM_N
#undef SM90_U32x2_STSM_N
#undef SM90_U32x4_STSM_N
#undef SM90_U16x2_STSM_T
#undef SM90_U16x4_STSM_T
#undef SM90_U16x8_STSM_T

#include "simt.h"

namespace simt {

// stmatrix.xN: lane 8 m + i points to row i of 8x8 matrix m, which lane l holds elements
// (l / 4, 2 (l % 4)) and the next one of, or of the transpose.
template <bool kTransposed, int kMatrices>
void stmatrix(uint32_t const (&registers)[kMatrices], void* row) {
  exchange(registers, [&](auto of) {
    int const m = lane() / 8, i = lane() % 8;
    if (m >= kMatrices) {
      return;
    }
    uint16_t elements[8];
    for (int j = 0; j < 8; ++j) {
      int const major = kTransposed ? j : i, minor = kTransposed ? i : j;
      uint32_t const pair = of(major * 4 + minor / 2)[m];
      elements[j] = static_cast<uint16_t>(pair >> (minor % 2 * 16));
    }
    std::memcpy(row, elements, sizeof(elements));
  });
}

}  // namespace simt

namespace cute {

template <bool kTransposed>
struct HostStoreMatrix1 {
  using SRegisters = uint32_t[1];
  using DRegisters = uint128_t[1];
  static void copy(uint32_t const& s0, uint128_t& row) {
    simt::stmatrix<kTransposed, 1>({s0}, &row);
  }
};

template <bool kTransposed>
struct HostStoreMatrix2 {
  using SRegisters = uint32_t[2];
  using DRegisters = uint128_t[1];
  static void copy(uint32_t const& s0, uint32_t const& s1, uint128_t& row) {
    simt::stmatrix<kTransposed, 2>({s0, s1}, &row);
  }
};

template <bool kTransposed>
struct HostStoreMatrix4 {
  using SRegisters = uint32_t[4];
  using DRegisters = uint128_t[1];
  static void copy(uint32_t const& s0, uint32_t const& s1, uint32_t const& s2, uint32_t const& s3,
                   uint128_t& row) {
    simt::stmatrix<kTransposed, 4>({s0, s1, s2, s3}, &row);
  }
};

struct SM90_U32x1_STSM_N : HostStoreMatrix1<false> {};
struct SM90_U32x2_STSM_N : HostStoreMatrix2<false> {};
struct SM90_U32x4_STSM_N : HostStoreMatrix4<false> {};
struct SM90_U16x2_STSM_T : HostStoreMatrix1<true> {};
struct SM90_U16x4_STSM_T : HostStoreMatrix2<true> {};
struct SM90_U16x8_STSM_T : HostStoreMatrix4<true> {};

}  // namespace cute
