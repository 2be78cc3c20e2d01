// How a call of linear attention is divided: a pure function of K and, for the forward, the GPU's
// shared memory.
#pragma once

#include <iterator>

#include "params/common.h"

namespace flash::linear {

// How the states before chunks are divided, and the outputs where no CTA walks.
struct Tiling {
  int k_tile;  // columns of a tile of Q and K
  int v_tile;  // of V
  int chunk;   // tokens
  int heads;   // of a CTA
  bool tiled;  // K has several tiles
};

constexpr Tiling kTilings[] = {
    {16, 32, 128, 4, false},   {32, 64, 128, 2, false}, {64, 128, 128, 1, false},
    {128, 128, 128, 1, false}, {64, 128, 128, 1, true},
};

// The first tiling whose tile has all of K; else the tiled one.
constexpr int tiling_number(int k_dim) {
  int number = 0;
  while (!kTilings[number].tiled && k_dim > kTilings[number].k_tile) {
    ++number;
  }
  return number;
}

constexpr int kEveryGpusSmem = 99 * 1024;  // of a CTA

// How the forward is divided where a CTA has the states of all rows of K and some columns of V in
// registers, and walks along the chunks of a segment. Segments are as long whatever else is in the
// batch, because their borders decide how sums are rounded.
struct WalkTiling {
  int k_tile;
  int chunk;      // tokens
  int v_of_warp;  // columns of V
  int warps_v;    // along V
  int warps_k;    // that share the rows of K, each with a part of the sums over K
  int heads;      // of a CTA, side by side in memory
  int segment;    // tokens
  int resident;   // CTAs on an SM of 227 KiB, for which registers are left

  constexpr int v_tile() const { return v_of_warp * warps_v; }
  // Numbers of a head's state as the launches leave them to each other: those of whole tiles.
  constexpr int64_t state_size(int v_dim) const {
    return int64_t(k_tile) * ((v_dim + v_tile() - 1) / v_tile() * v_tile());
  }
  // Shared memory of a CTA of the outputs: Q, K and V of two chunks, and for each head A's squares
  // and decays of 24 bytes a token; where warps share the rows of K, parts of squares and of rows.
  constexpr int smem_bytes() const {
    int const squares = chunk / 16 * (chunk / 16 + 1) / 2 * 512;
    int const tiles = 2 * 2 * chunk * (2 * k_tile + v_tile());
    int const of_head = tiles + squares * (warps_k > 1 ? 2 * warps_k : 1) + 2 * 24 * chunk;
    return heads * of_head + (warps_k > 1 ? 4 * warps_k * chunk * v_tile() : 16);
  }
};

// The second one of K 256 is for GPUs with less shared memory.
constexpr WalkTiling kWalkTilings[] = {
    {16, 64, 16, 2, 1, 2, 1024, 4},  {32, 64, 16, 4, 1, 1, 1024, 4},
    {64, 64, 16, 8, 1, 1, 1024, 2},  {128, 32, 16, 8, 1, 1, 1024, 2},
    {256, 64, 16, 4, 2, 1, 4096, 1}, {256, 32, 16, 4, 2, 1, 4096, 1},
    {512, 32, 16, 4, 4, 1, 4096, 1},
};
constexpr int kWalkTilingCount = std::size(kWalkTilings);

// The first tiling whose tile has all of K and that fits a CTA's shared memory; kWalkTilingCount
// where there is none.
constexpr int walk_number(int k_dim, int smem_per_block) {
  int number = 0;
  while (number < kWalkTilingCount && (k_dim > kWalkTilings[number].k_tile ||
                                       kWalkTilings[number].smem_bytes() > smem_per_block)) {
    ++number;
  }
  return number;
}

// The same with a vector of decays. Each fits 99 KiB, which every GPU has. How a chunk is cut
// changes no bit: sums are those of steps of 16 tokens.
constexpr WalkTiling kVectorTilings[] = {
    {16, 32, 16, 2, 1, 2, 1024, 4},  {32, 32, 16, 4, 1, 1, 1024, 4},
    {64, 32, 16, 8, 1, 1, 1024, 2},  {128, 16, 16, 8, 1, 1, 1024, 2},
    {256, 16, 16, 4, 2, 1, 2048, 2},
};
constexpr int kVectorTilingCount = std::size(kVectorTilings);
constexpr int kVectorStages = 3;  // chunks that are loaded, or under way

// Whether walks make a chunk's factors (sm80/linear/vector_factors.h) themselves, because those are
// many bytes beside V's. Else a launch before them makes what every tile of V would make again.
constexpr bool makes_own_factors(WalkTiling const& tiling) { return tiling.k_tile <= 16; }

// The size of a chunk's factors in memory for one head: K times its decays, Q in two numbers; for
// each 16 tokens A's square and the decays of the state's rows.
constexpr int vector_factors_bytes(WalkTiling const& tiling) {
  return tiling.chunk * tiling.k_tile * 3 * 2 + tiling.chunk / 16 * (512 + 4 * tiling.k_tile);
}

// The first tiling whose tile has all of K; kVectorTilingCount where there is none.
constexpr int vector_number(int k_dim) {
  int number = 0;
  while (number < kVectorTilingCount && k_dim > kVectorTilings[number].k_tile) {
    ++number;
  }
  return number;
}

// How dQ and dK with a vector of decays are divided: a warp has 16 rows of K of a state, and half
// of the tile's columns of V. Larger K and V have several tiles; those of V leave parts of the
// gradients. Each fits 99 KiB, and segments are those of vector_number's tiling.
struct VectorGradientsTiling {
  int k_tile;
  int v_tile;
  int heads;     // of a CTA
  int resident;  // CTAs on an SM, for which registers are left
};

constexpr VectorGradientsTiling kVectorGradientsTilings[] = {
    {16, 32, 2, 4}, {32, 64, 1, 4}, {64, 128, 1, 2}, {64, 256, 1, 2}};
constexpr int kVectorGradientsTilingCount = std::size(kVectorGradientsTilings);

// The first tiling whose tile has all of K. The last two differ in v_tile: the smaller if it has
// all of V.
constexpr int vector_gradients_number(int k_dim, int v_dim) {
  constexpr int kLargest = kVectorGradientsTilingCount - 1;
  int number = 0;
  while (number + 1 < kLargest && k_dim > kVectorGradientsTilings[number].k_tile) {
    ++number;
  }
  bool const is_wider = number + 1 == kLargest && v_dim > kVectorGradientsTilings[number].v_tile;
  return is_wider ? kLargest : number;
}

// Columns of the tiles of the gradients' kernel, whose CTA has a chunk and head, and whether K has
// several tiles. Each fits 99 KiB, which every GPU has.
struct GradientsTiling {
  int k_tile;
  int v_tile;
  bool tiled;
};

constexpr GradientsTiling kGradientsTilings[] = {
    {16, 32, false}, {32, 64, false}, {64, 32, false}, {64, 32, true}};
constexpr int kGradientsChunk = 128;

constexpr int gradients_tiling_number(int k_dim) {
  int number = 0;
  while (!kGradientsTilings[number].tiled && k_dim > kGradientsTilings[number].k_tile) {
    ++number;
  }
  return number;
}

// Chunks of a sequence.
FLASH_HD int chunks_of(int tokens, int chunk) { return (tokens + chunk - 1) / chunk; }

// Slots that are enough whatever the sequences' lengths: sequence n begins at slot
// cu[n] / chunk + n, because it has at most (cu[n + 1] - cu[n]) / chunk + 1 chunks.
FLASH_HD int most_slots(bool varlen, int count, int tokens, int chunk) {
  return varlen ? tokens / chunk + count : count * chunks_of(tokens, chunk);
}

}  // namespace flash::linear
