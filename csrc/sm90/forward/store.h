// O and LSE from registers to global memory.
#pragma once

#include "sm90/forward/accumulators.h"
#include "sm90/forward/row_block.h"

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

// Divides by the softmax denominator and writes O [rows, head_dim] and LSE [rows] of a warpgroup.
// Straight from registers: a way through shared memory and TMA would need a buffer that the larger
// tiles have no room for but in Q's or V's, whose next load would then wait for it; and the rows
// behind the end of a sequence belong to the next one. A quad writes 32 bytes of a row at a time.
template <class Config>
__device__ void store(FwdParams const& p, RowBlock<Config> const& block, int warpgroup, int thread,
                      Accumulators<Config>& acc) {
  using Element = typename Config::Element;
  constexpr int kRows = Accumulators<Config>::kRows;
  FragmentCoord<4> const coord(thread);
  int const first = warpgroup * kWarpgroupRows, quad_lane = thread % 4;
  float const keep_scale =
      Config::kScores == ScoreLevel::Full ? reciprocal_fast(1.f - p.scores.dropout_p) : 1.f;
  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int const row = first + coord.row(r);
    auto const finished = acc.softmax.finish(r, block.sink, QuadReduce{});
    scale[r] = finished.out_scale * keep_scale;
    store_if(quad_lane == 0 && row < block.rows, block.lse + row, finished.lse);
  }
  acc.rescale(scale);

  constexpr int kGroups = Config::kHeadDimV / 8;
  Tensor pairs = make_tensor<uint32_t>(Shape<_2, Int<kGroups>>{});  // (row, group of 8 columns)
  pack<Element>(acc.out, pairs);
  bool const odd = quad_lane % 2;
  int const column = (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int const row = first + coord.row(r);
    int const columns = row < block.rows ? p.head_dim_v : 0;
    Element* const target = block.out + row * p.out.row_stride + column;
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      store_if(column + group * 8 < columns, target + group * 8,
               halves_of_groups(pairs(r, group), pairs(r, group + 1), odd));
    }
  }
}

}  // namespace flash::sm90
