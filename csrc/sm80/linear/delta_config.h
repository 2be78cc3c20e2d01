// Tiles of the gated delta rule's kernels. A tile of K is panels of 64 columns, so that few threads
// can fill it (TileStream).
#pragma once

#include "linear/delta_rule.h"
#include "sm80/linear/walk_store.h"

namespace flash::sm80::linear {

using flash::linear::DeltaFactors;
using flash::linear::DeltaParams;
using flash::linear::DeltaTiling;
using flash::linear::kDeltaChunk;
using flash::linear::kDeltaSquares;
using flash::linear::kDeltaStrips;

constexpr int kPanel = 64;  // columns

template <int kK, class Element>
struct PanelTile {
  static constexpr int kPanels = kK / kPanel;
  static_assert(kK % kPanel == 0);

  alignas(16) Element panels[kPanels][kDeltaChunk * kPanel];

  // Starts to bring the tokens' rows of a head.
  template <int kThreads>
  __device__ void load(ForwardParams const& p, TensorView<void const> const& x,
                       flash::linear::Tokens const& tokens, int head) {
    auto const* source = rows_of<Element>(x, tokens, head, 0);
    // Not unrolled: the addresses of several panels would take registers from the state.
#pragma unroll 1
    for (int n = 0; n < kPanels; ++n) {
      load_tile<kDeltaChunk, kPanel, kThreads>(source + n * kPanel, x.row_stride, panels[n],
                                               tokens.count, p.k_dim - n * kPanel, p.aligned_k);
    }
  }

  // The sum of a token's squares.
  __device__ float squares(int token) const {
    float sum = 0.f;
#pragma unroll 1
    for (int run = 0; run < kK / kRunElements; ++run) {
      Element const* const own = panels[run / (kPanel / kRunElements)] +
                                 offset_in_tile<kPanel>(token, run % (kPanel / kRunElements));
      uint4 const words = *reinterpret_cast<uint4 const*>(own);
      for (uint32_t const word : {words.x, words.y, words.z, words.w}) {
        float2 const pair = unpack<Element>(word);
        sum += pair.x * pair.x + pair.y * pair.y;
      }
    }
    return sum;
  }

  // Squares at (16 tokens, 16 columns) as operands; `deep`: the tokens are what is summed over.
  __device__ void as_a(int row, int column, uint32_t (&a)[4]) const {
    read_a<kPanel>(panels[column / kPanel], row, column % kPanel, a);
  }
  __device__ void as_b(int row, int column, uint32_t (&b)[4]) const {
    read_b<kPanel>(panels[column / kPanel], row, column % kPanel, b);
  }
  __device__ void as_b_deep(int row, int column, uint32_t (&b)[4]) const {
    read_b_deep<kPanel>(panels[column / kPanel], row, column % kPanel, b);
  }
};

// The strip of a square on or below the diagonal, numbered by strips: 0, 1, 1, 2, 2, 2.
__device__ constexpr int strip_of_square(int number) {
  int strip = 0;
  while (number >= square_of(strip + 1, 0)) {
    ++strip;
  }
  return strip;
}

}  // namespace flash::sm80::linear
