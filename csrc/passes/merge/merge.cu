// Merges two results of attention over disjoint keys: each row of the first moves towards that of
// the second by the second's share of both softmax denominators. It only moves memory, so head dims
// are numbers, and nothing of a tile's shape matters.
#include "passes/merge/launch.h"

#include <cutlass/numeric_types.h>

#include <cmath>
#include <string_view>

#include "launch/launch_kernel.h"

namespace flash::merge {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = 8;
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;
constexpr int kChunk = 8;  // elements a lane moves at a time

template <class Element>
struct alignas(16) Chunk {
  Element element[kChunk];
};

struct Row {
  int batch;
  int row;
  int head;
};

FLASH_HD int64_t num_rows(MergeParams const& p) { return int64_t(p.batch) * p.rows * p.heads; }

FLASH_HD int64_t num_blocks(MergeParams const& p) {
  return (num_rows(p) + kRowsPerBlock - 1) / kRowsPerBlock;
}

// Heads first: their rows are neighbours in memory.
FLASH_HD Row row_of(MergeParams const& p, int64_t index) {
  int64_t const token = index / p.heads;
  return {int(token / p.rows), int(token % p.rows), int(index % p.heads)};
}

struct Merged {
  float lse;
  float share_b;  // of the denominator
};

// A row that sees nothing has LSE -inf and no share; a row whose sink takes all has LSE +inf and
// takes the whole share; NaN in either LSE makes the merged row NaN.
FLASH_HD Merged merged(float lse_a, float lse_b) {
  if (lse_b == -INFINITY) {
    return {lse_a, 0.f};
  }
  float const larger = fmaxf(lse_a, lse_b);
  float const a = lse_a == larger ? 1.f : expf(lse_a - larger);
  float const b = lse_b == larger ? 1.f : expf(lse_b - larger);
  return {larger + logf(a + b), b / (a + b)};
}

template <class Out, class A, class B>
__device__ void merge_row(Out* out, A const* a, B const* b, float share_b, int columns, int lane) {
  for (int c = lane * kChunk; c < columns; c += kLanesPerRow * kChunk) {
    auto const mine = *reinterpret_cast<Chunk<A> const*>(a + c);
    auto const theirs = *reinterpret_cast<Chunk<B> const*>(b + c);
    Chunk<Out> merged;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float const x = float(mine.element[i]);
      // b's elements may be NaN where b counts for nothing.
      merged.element[i] = Out(share_b == 0.f ? x : x + share_b * (float(theirs.element[i]) - x));
    }
    *reinterpret_cast<Chunk<Out>*>(out + c) = merged;
  }
}

// Out and A are what is kept between merges: B or float.
template <class Out, class A, class B>
__global__ void __launch_bounds__(kThreads) merge_kernel(__grid_constant__ MergeParams const p) {
  int const lane = threadIdx.x % kLanesPerRow;
  int64_t const index = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
  bool const exists = index < num_rows(p);
  Row const r = row_of(p, exists ? index : 0);
  float* const lse_a = p.lse_a.at(r.batch, r.row, r.head);
  Merged const m = merged(*lse_a, *p.lse_b.at(r.batch, r.row, r.head));
  __syncwarp();  // one lane writes what all lanes of the row have read
  if (exists && lane == 0) {
    *lse_a = m.lse;
  }
  bool const stays = m.share_b == 0.f && p.out.ptr == p.out_a.ptr;
  if (exists && !stays) {
    merge_row(static_cast<Out*>(p.out.ptr) + p.out.offset(r.batch, r.row, r.head),
              static_cast<A const*>(p.out_a.ptr) + p.out_a.offset(r.batch, r.row, r.head),
              static_cast<B const*>(p.out_b.ptr) + p.out_b.offset(r.batch, r.row, r.head),
              m.share_b, p.head_dim_v, lane);
  }
}

template <class Out, class A, class B>
void launch_for(MergeParams const& p, LaunchContext const& launch) {
  launch_kernel<merge_kernel<Out, A, B>>(launch, {num_blocks(p), kThreads, 0}, p);
}

template <class Element>
void launch_of(MergeParams const& p, MergeWidths wide, LaunchContext const& launch) {
  auto const to_narrow =
      wide.out_a ? launch_for<Element, float, Element> : launch_for<Element, Element, Element>;
  auto const to_wide =
      wide.out_a ? launch_for<float, float, Element> : launch_for<float, Element, Element>;
  (wide.out ? to_wide : to_narrow)(p, launch);
}

}  // namespace flash::merge

void flash::launch_merge(MergeParams const& params, char const* dtype, MergeWidths wide,
                         LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? merge::launch_of<cutlass::bfloat16_t>
                                                           : merge::launch_of<cutlass::half_t>;
  launch_it(params, wide, launch);
}
