// Stores rows of accumulators from registers to global memory.
#pragma once

#include "core/fragment_coord.h"
#include "sm90/tensor_core.h"

namespace flash::sm90 {

// Predicated, because ptxas makes a branch of every condition around a store.
__device__ inline void store_if(bool condition, float* to, float x) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.f32 [%1], %2; }" ::"r"(int(condition)),
      "l"(to), "f"(x)
      : "memory");
#else
  if (condition) *to = x;
#endif
}

// The operands are "f": with words instead, ptxas spills the accumulators that they come from.
__device__ inline void store_if(bool condition, float* to, float2 x) {
#if defined(__CUDA_ARCH__)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3}; }" ::"r"(
                   int(condition)),
               "l"(to), "f"(x.x), "f"(x.y)
               : "memory");
#else
  if (condition) *reinterpret_cast<float2*>(to) = x;
#endif
}

__device__ inline void store_if(bool condition, void* to, uint2 x) {
#if defined(__CUDA_ARCH__)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }" ::"r"(
                   int(condition)),
               "l"(to), "r"(x.x), "r"(x.y)
               : "memory");
#else
  if (condition) *static_cast<uint2*>(to) = x;
#endif
}

__device__ inline void store_if(bool condition, void* to, uint4 x) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(
          int(condition)),
      "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
#else
  if (condition) *static_cast<uint4*>(to) = x;
#endif
}

// Lane t of a quad holds columns 2 t and 2 t + 1 of two eights. Afterwards lanes 0 and 2
// hold the halves of the first eight, lanes 1 and 3 those of the second.
__device__ inline uint2 halves_of_eights(uint32_t first, uint32_t second, bool odd) {
  uint32_t const theirs = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
  return odd ? uint2{theirs, second} : uint2{first, theirs};
}

// The same for four eights: afterwards lane t holds the whole t-th one.
__device__ inline uint4 eight_of_quad(uint32_t const (&of)[4], int quad_lane) {
  bool const odd = quad_lane % 2, high = quad_lane / 2;
  // Each lane now holds half of one of the first two, and half of one of the last two.
  uint32_t const first = __shfl_xor_sync(0xffffffffu, odd ? of[0] : of[1], 1);
  uint32_t const last = __shfl_xor_sync(0xffffffffu, odd ? of[2] : of[3], 1);
  uint2 const of_first = odd ? uint2{first, of[1]} : uint2{of[0], first};
  uint2 const of_last = odd ? uint2{last, of[3]} : uint2{of[2], last};
  uint32_t const x = __shfl_xor_sync(0xffffffffu, high ? of_first.x : of_last.x, 2);
  uint32_t const y = __shfl_xor_sync(0xffffffffu, high ? of_first.y : of_last.y, 2);
  return high ? uint4{x, y, of_last.x, of_last.y} : uint4{of_first.x, of_first.y, x, y};
}

// The part of a tile that exists in memory.
struct Extent {
  int rows;
  int columns;  // a multiple of 8
};

struct AllEights {
  __device__ bool operator()(int) const { return true; }
};

// Stores a warpgroup's accumulator (64, columns) to `target`, as far as `extent` goes. A quad
// writes 32 bytes of a row at a time. wanted(eight): whether to store the pair of eights of
// columns that begins with `eight`.
template <class Element, class Accumulator, class Wanted = AllEights>
__device__ __forceinline__ void store_rows(Accumulator const& accumulator, Element* target,
                                           int64_t row_stride, Extent extent, int thread,
                                           Wanted wanted = {}) {
  constexpr int kEights = decltype(size(accumulator))::value / 4;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
  pack<Element>(accumulator, pairs);
  FragmentCoord<4> const coord(thread);
  int const quad_lane = thread % 4;
  bool const odd = quad_lane % 2;
  int const column = (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const columns = coord.row(r) < extent.rows ? extent.columns : 0;
    Element* const row = target + coord.row(r) * row_stride + column;
#pragma unroll
    for (int eight = 0; eight < kEights; eight += 2) {
      store_if(column + eight * 8 < columns && wanted(eight), row + eight * 8,
               halves_of_eights(pairs(r, eight), pairs(r, eight + 1), odd));
    }
  }
}

// The same, 64 bytes of a row at a time. wanted(eight): whether to store these eight columns.
template <class Element, class Accumulator, class Wanted = AllEights>
__device__ __forceinline__ void store_wide_rows(Accumulator const& accumulator, Element* target,
                                                int64_t row_stride, Extent extent, int thread,
                                                Wanted wanted = {}) {
  constexpr int kEights = decltype(size(accumulator))::value / 4;
  static_assert(kEights % 4 == 0);
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kEights>>{});  // (row, eight columns)
  pack<Element>(accumulator, pairs);
  FragmentCoord<4> const coord(thread);
  int const quad_lane = thread % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const columns = coord.row(r) < extent.rows ? extent.columns : 0;
    Element* const row = target + coord.row(r) * row_stride + quad_lane * 8;
#pragma unroll
    for (int first = 0; first < kEights; first += 4) {
      uint32_t const words[4] = {pairs(r, first), pairs(r, first + 1), pairs(r, first + 2),
                                 pairs(r, first + 3)};
      int const eight = first + quad_lane;
      store_if(eight * 8 < columns && wanted(eight), row + first * 8,
               eight_of_quad(words, quad_lane));
    }
  }
}

// The same in fp32, for all columns of the accumulator. A quad writes 32 bytes of a row at a time.
template <class Accumulator>
__device__ __forceinline__ void store_sums(Accumulator const& accumulator, float* target,
                                           int64_t row_stride, int rows, int thread) {
  constexpr int kEights = decltype(size(accumulator))::value / 4;
  FragmentCoord<4> const coord(thread);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bool const exists = coord.row(r) < rows;
    float* const row = target + coord.row(r) * row_stride + thread % 4 * 2;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      int const i = eight * 4 + r * 2;
      store_if(exists, row + eight * 8, float2{accumulator(i), accumulator(i + 1)});
    }
  }
}

}  // namespace flash::sm90
