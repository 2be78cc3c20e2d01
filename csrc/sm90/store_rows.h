// Rows of accumulators from registers to global memory.
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

// By "f": of words, ptxas spills the accumulators that they come from.
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

// Lane t of a quad holds columns 2 t and 2 t + 1 of two groups of eight. Afterwards lanes 0 and 2
// hold the halves of the first group, lanes 1 and 3 those of the second.
__device__ inline uint2 halves_of_groups(uint32_t first, uint32_t second, bool odd) {
  uint32_t const theirs = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
  return odd ? uint2{theirs, second} : uint2{first, theirs};
}

// What there is of a tile in memory.
struct Extent {
  int rows;
  int columns;  // a multiple of 8
};

struct AllGroups {
  __device__ bool operator()(int) const { return true; }
};

// A warpgroup's accumulator (64, columns) to `target`, as far as `extent` goes. A quad writes 32
// bytes of a row at a time. wanted: which pairs of groups of 8 columns, by the first of them.
template <class Element, class Accumulator, class Wanted = AllGroups>
__device__ __forceinline__ void store_rows(Accumulator const& accumulator, Element* target,
                                           int64_t row_stride, Extent extent, int thread,
                                           Wanted wanted = {}) {
  constexpr int kGroups = decltype(size(accumulator))::value / 4;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kGroups>>{});  // (row, group of 8 columns)
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
    for (int group = 0; group < kGroups; group += 2) {
      store_if(column + group * 8 < columns && wanted(group), row + group * 8,
               halves_of_groups(pairs(r, group), pairs(r, group + 1), odd));
    }
  }
}

// The same in fp32, all columns of the accumulator. A quad writes 32 bytes of a row at a time.
template <class Accumulator>
__device__ __forceinline__ void store_sums(Accumulator const& accumulator, float* target,
                                           int64_t row_stride, int rows, int thread) {
  constexpr int kGroups = decltype(size(accumulator))::value / 4;
  FragmentCoord<4> const coord(thread);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bool const exists = coord.row(r) < rows;
    float* const row = target + coord.row(r) * row_stride + thread % 4 * 2;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      int const i = group * 4 + r * 2;
      store_if(exists, row + group * 8, float2{accumulator(i), accumulator(i + 1)});
    }
  }
}

}  // namespace flash::sm90
