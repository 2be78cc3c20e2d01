// The family's tensor-core instruction, wgmma, and tiles in shared memory that feed it. Include it
// before any other header of CuTe.
#pragma once

#if defined(CUTE_HOST_DEVICE) && !defined(CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
#error "include sm90/tensor_core.h first: it makes CuTe declare every width of wgmma"
#endif
// Adds widths (keys a tile) other than powers of two and their multiples by three; what CuTe has to
// know of them is in wgmma_widths.h.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cute/arch/mma_sm90.hpp>
#undef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

#include "sm90/wgmma_widths.h"

namespace flash::sm90 {

using namespace cute;

constexpr int kWarpgroup = 128;        // threads
constexpr int kWarpgroupRows = 64;     // of one wgmma
constexpr int kWarpRows = 16;          // of them in a warp's accumulators
constexpr int kMostSmem = 227 * 1024;  // bytes of shared memory of a CTA

// A tile's columns lie in runs of 64, or of 32 or 16 where the longer ones do not divide them: a
// run is one row of a swizzle pattern, and of what one TMA instruction copies. Run follows run;
// within a run, row follows row.
template <int kColumns>
constexpr int kRun = kColumns % 64 == 0   ? 64
                     : kColumns % 32 == 0 ? 32
                                          : 16;

// The swizzle pattern of so many columns, 16 bits each.
template <class Element, int kRunColumns>
using RunAtom =
    std::conditional_t<kRunColumns == 64, GMMA::Layout_K_SW128_Atom<Element>,
                       std::conditional_t<kRunColumns == 32, GMMA::Layout_K_SW64_Atom<Element>,
                                          GMMA::Layout_K_SW32_Atom<Element>>>;

// (kRows, kColumns, kTiles): tiles whose products reduce over the columns
template <class Element, int kRows, int kColumns, int kTiles, int kRunColumns = kRun<kColumns>>
using SmemTiles = decltype(tile_to_shape(RunAtom<Element, kRunColumns>{},
                                         Shape<Int<kRows>, Int<kColumns>, Int<kTiles>>{}));

// (kColumns, kRows, kTiles): the same memory, for products that reduce over the rows
template <class Element, int kRows, int kColumns, int kTiles, int kRunColumns = kRun<kColumns>>
using SmemTilesTransposed = decltype(tile_to_shape(
    std::conditional_t<kRunColumns == 64, GMMA::Layout_MN_SW128_Atom<Element>,
                       GMMA::Layout_MN_SW64_Atom<Element>>{},
    Shape<Int<kColumns>, Int<kRows>, Int<kTiles>>{}, Step<_2, _1, _3>{}));

// Both layouts. With kEights, eights of rows follow each other, and runs of 64 columns within
// one, so that any consecutive eights of rows are one piece of memory.
template <bool kEights, class Element, int kRows, int kColumns, int kTiles>
struct KeyTiles {
  using Layout = SmemTiles<Element, kRows, kColumns, kTiles>;
  using Transposed = SmemTilesTransposed<Element, kRows, kColumns, kTiles>;
};
template <class Element, int kRows, int kColumns, int kTiles>
struct KeyTiles<true, Element, kRows, kColumns, kTiles> {
  using Layout =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                             Shape<Int<kRows>, Int<kColumns>, Int<kTiles>>{}, Step<_2, _1, _3>{}));
  using Transposed =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                             Shape<Int<kColumns>, Int<kRows>, Int<kTiles>>{}, Step<_1, _2, _3>{}));
};

// One warpgroup, 64 x kN, both operands in shared memory with the reduction along their columns.
template <class Element, int kN, int kK>
using MmaBothShared = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kN>, Int<kK>>>()));

// The same with B's reduction along its rows.
template <class Element, int kN, int kK>
using MmaSharedA = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kN>, Int<kK>>,
                         GMMA::Major::K, GMMA::Major::MN>()));

// The same with the reduction along the rows of both.
template <class Element, int kN, int kK>
using MmaAcross = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kN>, Int<kK>>,
                         GMMA::Major::MN, GMMA::Major::MN>()));

// One warpgroup, 64 x kN, A in registers, B's reduction along its rows.
template <class Element, int kN, int kK>
using MmaRegisterA = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kN>, Int<kK>>,
                         GMMA::Major::K, GMMA::Major::MN>()));

// The same with the reduction along B's columns.
template <class Element, int kN, int kK>
using MmaRegisterQueries = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kN>, Int<kK>>,
                         GMMA::Major::K, GMMA::Major::K>()));

// Starts accumulator (+)= a·b and returns; warpgroup_wait tells when it is done. Until then nothing
// may touch the accumulator, nor `a` if it is in registers.
template <class Mma, class A, class B, class Accumulator>
__device__ __forceinline__ void start_product(bool accumulate, Mma mma, A const& a, B const& b,
                                              Accumulator& accumulator) {
  constexpr bool kRegisterA = !std::is_same_v<typename A::value_type, GmmaDescriptor>;
  warpgroup_fence_operand(accumulator);
  if constexpr (kRegisterA) {
    warpgroup_fence_operand(const_cast<A&>(a));
  }
  warpgroup_arrive();
  mma.accumulate_ = accumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
#pragma unroll
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), accumulator);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(accumulator);
}

template <bool kAccumulate, class Mma, class A, class B, class Accumulator>
__device__ __forceinline__ void start_product(Mma mma, A const& a, B const& b,
                                              Accumulator& accumulator) {
  start_product(kAccumulate, mma, a, b, accumulator);
}

// A wgmma accumulator ((2 cols, 2 rows, N / 8), 1, 1) seen as (rows, columns).
template <class Layout>
CUTE_HOST_DEVICE auto rows_and_columns(Layout const& accumulator) {
  return make_layout(make_layout(get<0, 1>(accumulator), get<1>(accumulator)),
                     make_layout(get<0, 0>(accumulator), get<0, 2>(accumulator)));
}

// The same registers as the A operand of a product that reduces over these columns: sixteen
// columns are the eight registers of one step, in order, ((2, 2, 2), 1, N / 16).
template <class Layout>
CUTE_HOST_DEVICE auto as_operand_a(Layout const& accumulator) {
  constexpr int kSteps = decltype(size<0, 2>(accumulator))::value / 2;
  return make_layout(Shape<Shape<_2, _2, _2>, _1, Int<kSteps>>{});
}

// Two fp32 numbers as 16-bit ones.
template <class Element>
__device__ uint32_t pack_pair(float lower, float upper) {
  cutlass::NumericArrayConverter<Element, float, 2> const converter;
  auto const packed = converter(cutlass::Array<float, 2>{lower, upper});
  return reinterpret_cast<uint32_t const&>(packed);
}

// fp32 registers as 16-bit numbers, two in a word, in the same order. The target is words because
// the compiler would move single halves of registers with four instructions a pair.
template <class Element, class Accumulator, class Words>
__device__ void pack(Accumulator const& from, Words& to) {
#pragma unroll
  for (int i = 0; i < size(to); ++i) {
    to.data()[i] = pack_pair<Element>(from.data()[2 * i], from.data()[2 * i + 1]);
  }
}

}  // namespace flash::sm90
