// Types of one sm80 forward kernel: everything that follows from its row in the variant table.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <type_traits>

namespace flash::sm80 {

using namespace cute;

enum class ScoreLevel { Plain, Full };

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_,
          ScoreLevel kScores_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr ScoreLevel kScores = kScores_;
  static_assert(kHeadDim % 64 == 0, "shared memory rows are swizzled in runs of 64 elements");
  static_assert(kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0);

  using Mma =
      std::conditional_t<std::is_same_v<Element, half_t>, MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>,
                         MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>>;
  // Warps are stacked along the rows, so that a row's maximum and sum stay within four lanes. The
  // 16-wide N lets one ldmatrix.x4 feed two instructions.
  using TiledMma =
      TiledMMA<Mma, Layout<Shape<Int<kWarps>, _1, _1>>, Tile<Int<16 * kWarps>, _16, _16>>;

  // 128-byte rows, 16-byte chunks XORed with the row: free of bank conflicts for cp.async (rows)
  // and ldmatrix (columns of chunks).
  using SmemAtom =
      decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using SmemLayoutKV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  // V seen as (d, keys), the B operand of P·V.
  using SmemLayoutVt = decltype(composition(
      SmemLayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>>, Stride<Int<kBlockN>, _1>>{}));

  // Tiles move between global and shared memory 16 bytes at a time, a 128-byte run per 8 threads.
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kChunksPerRow = 64 / kChunk;
  static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
  static_assert(kBlockM % kRowsPerPass == 0 && kBlockN % kRowsPerPass == 0,
                "a pass of all threads copies whole rows of one tile");
};

}  // namespace flash::sm80
