// The gated delta rule over chunks: what its kernels are given, and how a call is divided.
#pragma once

#include <iterator>

#include "launch/variant.h"
#include "linear/params.h"
#include "linear/tilings.h"

namespace flash::linear {

constexpr int kDeltaChunk = 64;                                       // tokens
constexpr int kDeltaStrips = kDeltaChunk / 16;                        // of 16 tokens
constexpr int kDeltaSquares = kDeltaStrips * (kDeltaStrips + 1) / 2;  // on and below the diagonal

// What the tokens of a chunk do to each other, whatever the state before the chunk is. Squares are
// operands of 16 x 16 numbers of 16 bits, a register's words by lane. If the call normalizes, q and
// k stay as they are, and all that multiplies them is divided by |q| and |k|, which are 1
// otherwise.
struct DeltaFactors {
  uint4 inverse[kDeltaSquares][32];  // T = (I + tril₋₁(beta K Kᵀ ∘ decays))⁻¹ diag(beta)
  uint4 weights[kDeltaSquares][32];  // A = scale tril(Q Kᵀ ∘ decays)
  float reads_q[kDeltaChunk];        // scale / |q|, times the decay from the chunk's begin
  float reads_k[kDeltaChunk];        // 1 / |k|, times the same
  float enters[kDeltaChunk];         // 1 / |k|, times the decay to the chunk's end
  float4 total;  // x: the decay from its begin to its end; a run is copied whole
};

struct DeltaParams {
  ForwardParams forward;  // its sequences are cut into chunks
  GateView beta;          // [b, t, h]
  DeltaFactors* factors;  // [slots, h]
  bool normalizes;        // q and k are divided by their norms
};

// How the walk along a sequence is divided: a CTA has all rows of K of a state, as many as k_tile,
// and 16 columns of V for each warp. Chunks of tokens arrive in as many stages.
struct DeltaTiling {
  int k_tile;
  int warps;
  int stages;

  constexpr int v_tile() const { return 16 * warps; }
  constexpr int smem_bytes() const {
    int const tokens = 2 * kDeltaChunk * (2 * k_tile + v_tile());
    return stages * (tokens + static_cast<int>(sizeof(DeltaFactors)));
  }
};

// Wider ones first. The last one is for GPUs with less shared memory.
constexpr DeltaTiling kDeltaTilings[] = {{64, 4, 2},  {64, 2, 2},  {128, 4, 2}, {128, 2, 2},
                                         {256, 4, 2}, {256, 2, 2}, {256, 2, 1}};
constexpr int kDeltaTilingCount = std::size(kDeltaTilings);
constexpr int kDeltaK = 256;  // the largest

// The first tiling whose tile has all of K and that fits a CTA's shared memory. narrow: CTAs of few
// columns of V are asked for. No result depends on the tiling, as no warp's sums depend on
// another's.
constexpr int delta_number(int k_dim, int smem_per_block, bool narrow) {
  int number = 0;
  while (number + 1 < kDeltaTilingCount &&
         (k_dim > kDeltaTilings[number].k_tile || (narrow && kDeltaTilings[number].warps > 2) ||
          kDeltaTilings[number].smem_bytes() > smem_per_block)) {
    ++number;
  }
  return number;
}

// dtype: of q, "bf16" or "fp16".
void launch_delta(DeltaParams const& p, char const* dtype, LaunchContext const& launch);

}  // namespace flash::linear
