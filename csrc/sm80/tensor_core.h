// The family's tensor-core instruction, and tiles in shared memory that feed it.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

namespace flash::sm80 {

using namespace cute;

template <class Element>
using MmaInstruction =
    std::conditional_t<std::is_same_v<Element, half_t>, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                       MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;

// Warps are stacked along the rows, so that whatever is reduced over a row stays within four lanes.
// The 16-wide N lets one ldmatrix.x4 feed two instructions.
template <class Element, int kWarps>
using StackedMma = TiledMMA<MmaInstruction<Element>, Layout<Shape<Int<kWarps>, _1, _1>>,
                            Tile<Int<16 * kWarps>, _16, _16>>;

// A tile's columns lie in runs of 64, or of 32 where 64 does not divide them: 128 or 64 bytes.
template <int kColumns>
constexpr int kRun = kColumns % 64 == 0 ? 64 : 32;

// 16-byte chunks of a run XORed with the row: free of bank conflicts for cp.async (rows) and
// ldmatrix (columns of chunks). Eight rows of 64 bytes are four lines of all banks, so there the
// row's lowest bit picks the half of a line and the next two take part in the XOR.
template <int kColumns>
using SmemAtom = decltype(composition(
    Swizzle<kRun<kColumns> == 64 ? 3 : 2, 3, 3>{},
    Layout<Shape<_8, Int<kRun<kColumns>>>, Stride<Int<kRun<kColumns>>, _1>>{}));

// (kRows, kColumns), 16-bit elements
template <int kRows, int kColumns>
using SmemTile = decltype(tile_to_shape(SmemAtom<kColumns>{}, Shape<Int<kRows>, Int<kColumns>>{}));

// The same memory seen as (kColumns, kRows): an operand whose reduction runs over the rows.
template <int kRows, int kColumns>
using SmemTileTransposed =
    decltype(composition(SmemTile<kRows, kColumns>{},
                         Layout<Shape<Int<kColumns>, Int<kRows>>, Stride<Int<kRows>, _1>>{}));

}  // namespace flash::sm80
