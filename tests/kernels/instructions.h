// The instructions of sm_80 that the kernels use, for the threads of simt.h. CuTe's structs of the
// same names are put out of the way; its traits, which say what each lane holds, are used as they
// are.
//
// They are harsher than a GPU: shared memory that an asynchronous copy is going to fill holds NaN
// until the copy is waited for, so a missing wait or barrier shows.
#pragma once

#include "intrinsics.h"
#include "tensor_core.h"

#define SM75_U32x4_LDSM_N SM75_U32x4_LDSM_N_gpu
#define SM75_U16x8_LDSM_T SM75_U16x8_LDSM_T_gpu
#include <cute/arch/copy_sm75.hpp>
#undef SM75_U32x4_LDSM_N
#undef SM75_U16x8_LDSM_T
#define SM80_CP_ASYNC_CACHEGLOBAL_ZFILL SM80_CP_ASYNC_CACHEGLOBAL_ZFILL_gpu
#define SM80_CP_ASYNC_CACHEALWAYS_ZFILL SM80_CP_ASYNC_CACHEALWAYS_ZFILL_gpu
#define cp_async_fence cp_async_fence_gpu
#define cp_async_wait cp_async_wait_gpu
#include <cute/arch/copy_sm80.hpp>
#undef SM80_CP_ASYNC_CACHEGLOBAL_ZFILL
#undef SM80_CP_ASYNC_CACHEALWAYS_ZFILL
#undef cp_async_fence
#undef cp_async_wait
#define SM80_16x8x16_F32F16F16F32_TN SM80_16x8x16_F32F16F16F32_TN_gpu
#define SM80_16x8x16_F32BF16BF16F32_TN SM80_16x8x16_F32BF16BF16F32_TN_gpu
#include <cute/arch/mma_sm80.hpp>
#undef SM80_16x8x16_F32F16F16F32_TN
#undef SM80_16x8x16_F32BF16BF16F32_TN

#include <cutlass/numeric_types.h>

namespace simt {

// ldmatrix.x4: lane 8 m + i points to row i of 8x8 matrix m. Lane l receives, of each matrix,
// elements (l / 4, 2 (l % 4)) and the next one, or of the transpose.
template <bool kTransposed>
void ldmatrix(void const* row, uint32_t* const (&out)[4]) {
  using Row = uint16_t const*;
  exchange({static_cast<Row>(row)}, [&](auto of) {
    for (int m = 0; m < 4; ++m) {
      if (lane() == 0) {
        uintptr_t rows[8];
        for (int i = 0; i < 8; ++i) {
          rows[i] = reinterpret_cast<uintptr_t>(*of(8 * m + i));
        }
        count_pass(kTransposed ? "ldmatrix.trans" : "ldmatrix", rows);
      }
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        int const major = lane() / 4, minor = lane() % 4 * 2 + e;
        int const i = kTransposed ? minor : major, j = kTransposed ? major : minor;
        pair[e] = (*of(8 * m + i))[j];
      }
      std::memcpy(out[m], pair, sizeof(pair));
    }
  });
}

}  // namespace simt

namespace cute {

struct SM75_U32x4_LDSM_N {
  using SRegisters = uint128_t[1];
  using DRegisters = uint32_t[4];
  static void copy(uint128_t const& row, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
    simt::ldmatrix<false>(&row, {&d0, &d1, &d2, &d3});
  }
};

struct SM75_U16x8_LDSM_T {
  using SRegisters = uint128_t[1];
  using DRegisters = uint32_t[4];
  static void copy(uint128_t const& row, uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3) {
    simt::ldmatrix<true>(&row, {&d0, &d1, &d2, &d3});
  }
};

template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL {
  static void copy(TS const& source, TD& target, bool exists) {
    static_assert(sizeof(TS) == sizeof(TD) && sizeof(TD) <= simt::PendingCopy::kMostBytes);
    auto const bits = reinterpret_cast<uintptr_t>(&source) | reinterpret_cast<uintptr_t>(&target);
    simt::expect(bits % sizeof(TD) == 0, "cp.async of ", sizeof(TD), " bytes is not aligned");
    std::memset(&target, 0xff, sizeof(TD));
    simt::Thread& t = simt::thread();
    t.copies.push_back({&target, exists ? &source : nullptr, sizeof(TD), t.groups, {}});
    if (exists) {
      std::memcpy(t.copies.back().issued.data(), &source, sizeof(TD));
    }
    t.copy_targets.push_back(reinterpret_cast<uintptr_t>(&target));
  }
};

// Through L1, which makes no difference here, and of smaller words as well.
template <class TS, class TD = TS>
struct SM80_CP_ASYNC_CACHEALWAYS_ZFILL : SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<TS, TD> {
  static_assert(sizeof(TS) == 4 || sizeof(TS) == 8 || sizeof(TS) == 16);
};

inline void cp_async_fence() { ++simt::thread().groups; }

// All groups but the newest kOutstanding arrive, and not one byte of those. When they were read is
// not known.
template <int kOutstanding>
void cp_async_wait() {
  simt::Thread& t = simt::thread();
  auto const is_late = [&](simt::PendingCopy const& c) {
    return c.group >= t.groups - kOutstanding;
  };
  for (simt::PendingCopy const& c : t.copies) {
    if (is_late(c)) {
      continue;
    }
    if (c.source) {
      if (std::memcmp(c.issued.data(), c.source, c.bytes) != 0) {
        throw std::logic_error("what an asynchronous copy reads changes before it arrives");
      }
      std::memcpy(c.target, c.source, c.bytes);
    } else {
      std::memset(c.target, 0, c.bytes);
    }
  }
  std::erase_if(t.copies, [&](auto const& c) { return !is_late(c); });
}

template <simt::Type kType>
struct HostMma16x8x16 {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0,
                  uint32_t const& a1, uint32_t const& a2, uint32_t const& a3, uint32_t const& b0,
                  uint32_t const& b1, float const& c0, float const& c1, float const& c2,
                  float const& c3) {
    simt::mma_16x8x16(kType, {&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
  }
};
struct SM80_16x8x16_F32F16F16F32_TN : HostMma16x8x16<simt::Type::kHalf> {};
struct SM80_16x8x16_F32BF16BF16F32_TN : HostMma16x8x16<simt::Type::kBfloat16> {};

}  // namespace cute
