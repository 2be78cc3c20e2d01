// How a call of linear attention is divided: a pure function of K and the GPU's shared memory.
#pragma once

#include "params/common.h"

namespace flash::linear {

// Columns of the tiles of Q and K, the tokens of a chunk, and whether K has several tiles.
struct Plan {
  int k_tile;
  int v_tile;
  int chunk;
  int heads;  // of a CTA
  bool tiled;
};

constexpr Plan kPlans[] = {
    {16, 32, 128, 4, false},   {32, 64, 128, 2, false}, {64, 128, 128, 1, false},
    {128, 128, 128, 1, false}, {64, 128, 128, 1, true},
};

// Shared memory of the outputs' CTA: Q, K, V and the state, of 16 bits, and 12 bytes of decays a
// token. With several tiles of K its rows are not needed, but for a run of 16 bytes.
constexpr int smem_bytes(Plan const& plan) {
  int const k_bytes = plan.tiled ? 16 : 2 * plan.chunk * plan.k_tile;
  int const qv_bytes = 2 * plan.chunk * (plan.k_tile + plan.v_tile);
  return plan.heads * (qv_bytes + k_bytes + 2 * plan.k_tile * plan.v_tile + 12 * plan.chunk);
}

// The first plan whose tile has all of K and fits a CTA's shared memory; else the tiled one, which
// fits every GPU.
constexpr int plan_number(int k_dim, int smem_per_block) {
  int number = 0;
  while (!kPlans[number].tiled &&
         (k_dim > kPlans[number].k_tile || smem_bytes(kPlans[number]) > smem_per_block)) {
    ++number;
  }
  return number;
}

constexpr Plan plan_of(int k_dim, int smem_per_block) {
  return kPlans[plan_number(k_dim, smem_per_block)];
}

// How the forward of up to kMostWalked columns of K is divided: a CTA walks along the chunks of a
// segment with the state of a few columns of V in registers. Segments are as long whatever else is
// in the batch, because their borders decide how sums are rounded.
struct WalkPlan {
  int k_tile;
  int v_of_warp;
  int warps_v;
  int heads;    // of a CTA
  int segment;  // tokens

  constexpr int v_tile() const { return v_of_warp * warps_v; }
  // Numbers of a head's state as the launches leave them to each other: those of whole tiles.
  constexpr int64_t state_size(int v_dim) const {
    return int64_t(k_tile) * ((v_dim + v_tile() - 1) / v_tile() * v_tile());
  }
};

constexpr WalkPlan kWalkPlans[] = {
    {16, 16, 2, 2, 512}, {32, 16, 4, 1, 512}, {64, 32, 4, 1, 1024}, {128, 16, 4, 1, 1024}};
constexpr int kMostWalked = 128;
constexpr int kEveryGpusSmem = 99 * 1024;  // of a CTA

constexpr int walk_number(int k_dim) {
  int number = 0;
  while (k_dim > kWalkPlans[number].k_tile) {
    ++number;
  }
  return number;
}

constexpr WalkPlan walk_plan_of(int k_dim) { return kWalkPlans[walk_number(k_dim)]; }

// Columns of the tiles of the gradients' kernel, whose CTA has a chunk and head, and whether K has
// several tiles. Each fits 99 KiB, which every GPU has.
struct GradientsPlan {
  int k_tile;
  int v_tile;
  bool tiled;
};

constexpr GradientsPlan kGradientsPlans[] = {
    {16, 32, false}, {32, 64, false}, {64, 32, false}, {64, 32, true}};
constexpr int kGradientsChunk = 128;
constexpr int kGradientsSmem = kEveryGpusSmem;

constexpr int gradients_plan_number(int k_dim) {
  int number = 0;
  while (!kGradientsPlans[number].tiled && k_dim > kGradientsPlans[number].k_tile) {
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
