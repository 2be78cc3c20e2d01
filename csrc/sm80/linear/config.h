// Types of the kernels of linear attention with scalar decay.
#pragma once

#include "linear/chunks.h"
#include "sm80/linear/tile.h"

namespace flash::sm80::linear {

using flash::linear::ForwardParams;

// The states before chunks are stored so. Sums over all earlier tokens leave the range of fp16,
// which ends at 65504: 65k tokens without decay do, if k and v are 1 on average. Those of bf16 do
// not.
using StateElement = cutlass::bfloat16_t;

// kK, kV: columns of a tile of Q and K, and of V. kHeads: heads of a CTA, side by side in memory.
// kTiled: K has more columns than a tile, and A is computed by a launch of its own.
template <class Element_, int kChunk_, int kK_, int kV_, int kHeads_, int kWarps_, bool kTiled_>
struct Config {
  using Element = Element_;
  static constexpr int kChunk = kChunk_, kK = kK_, kV = kV_, kHeads = kHeads_, kWarps = kWarps_;
  static constexpr bool kTiled = kTiled_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStrips = kChunk / 16;  // rows of a strip: an instruction's
};

// Tiles of a launch, by number: neighbours share what they read.
struct LinearTiles {
  int tiles_k;
  int tiles_v;
  int head_groups;
  int slots;

  FLASH_HD int64_t count() const { return int64_t(slots) * head_groups * tiles_k * tiles_v; }
};

struct Tile {
  int k_begin;
  int v_begin;
  int head;  // the first one
  int slot;
};

__device__ inline Tile tile_of(LinearTiles const& grid, int number, int kK, int kV, int kHeads) {
  int const v = number % grid.tiles_v;
  number /= grid.tiles_v;
  int const k = number % grid.tiles_k;
  number /= grid.tiles_k;
  int const head = number % grid.head_groups;
  return {k * kK, v * kV, head * kHeads, number / grid.head_groups};
}

// Heads of the tile.
template <class C>
__device__ int heads_in(ForwardParams const& p, Tile const& tile) {
  int const left = p.heads - tile.head;
  return left < C::kHeads ? left : C::kHeads;
}

// The first token's row of a head, from this column on.
template <class Element, class T>
__device__ auto rows_of(TensorView<T> const& x, flash::linear::Tokens const& tokens, int head,
                        int column) {
  using To = std::conditional_t<std::is_const_v<T>, Element const, Element>;
  return static_cast<To*>(x.ptr) + x.offset(tokens.batch, tokens.row, head) + column;
}

}  // namespace flash::sm80::linear
