// Masks, score mods and dropout of transposed scores (keys x queries) and of their gradient: like
// core/score_fragments.h, with queries as columns.
#pragma once

#include <cute/tensor.hpp>

#include "core/dropout.h"
#include "core/mask.h"
#include "core/score_mod.h"

namespace flash {

// Keys outside a query's limits get -inf.
template <class Scores, class Coord>
__device__ void apply_mask_transposed(Scores& s, SequenceMask const& mask, int row_begin,
                                      int key_begin, Coord coord) {
#pragma unroll
  for (int c = 0; c < cute::size<1>(s); ++c) {
    KeyLimits const keys = mask.limits(row_begin + coord.col(c));
    int const begin = keys.begin - key_begin, end = keys.end - key_begin;
#pragma unroll
    for (int r = 0; r < cute::size<0>(s); ++r) {
      int const key = coord.row(r);
      if (key < begin || key >= end) {
        s(r, c) = -INFINITY;
      }
    }
  }
}

// Applies scale, softcap and ALiBi; `slope` becomes the softcap's derivative, 1 without one. s: the
// accumulator s_mma seen as (keys, queries).
template <class Accumulator, class Scores, class Slope, class Coord>
__device__ void apply_score_mod_transposed(Accumulator& s_mma, Scores& s, Slope& slope,
                                           ScoreMod const& mod, int row_begin, int key_begin,
                                           Coord coord) {
#pragma unroll
  for (int i = 0; i < cute::size(s_mma); ++i) {
    s_mma(i) *= mod.softmax_scale;
  }
  if (mod.softcap > 0.f) {
    float const inverse = 1.f / mod.softcap;
    auto const cap = [&](auto tanh) {
#pragma unroll
      for (int i = 0; i < cute::size(s_mma); ++i) {
        float const t = tanh(s_mma(i) * inverse);
        s_mma(i) = mod.softcap * t;
        slope(i) = 1.f - t * t;
      }
    };
    if (mod.has_usual_cap()) {
      cap([](float x) { return tanh_absolute(x); });
    } else {
      cap([](float x) { return tanh_relative(x); });
    }
  } else {
#pragma unroll
    for (int i = 0; i < cute::size(s_mma); ++i) {
      slope(i) = 1.f;
    }
  }
  if (mod.alibi_slope != 0.f) {
#pragma unroll
    for (int c = 0; c < cute::size<1>(s); ++c) {
#pragma unroll
      for (int r = 0; r < cute::size<0>(s); ++r) {
        s(r, c) += mod.bias(row_begin + coord.col(c), key_begin + coord.row(r));
      }
    }
  }
}

// One bit for each entry of a thread's (kRows, kColumns): whether dropout keeps it. A byte for each
// 16 x 16 block, in which a thread holds rows r, r + 8 and columns c, c + 1, c + 8, c + 9.
template <int kRows, int kColumns>
struct KeepBits {
  static constexpr int kBlocks = kRows / 2 * (kColumns / 4);
  uint32_t word[(kBlocks + 3) / 4];

  // kWide: see DropoutMask::draw.
  template <bool kWide = false, class Coord>
  __device__ void draw(DropoutMask const& mask, int row_begin, int key_begin, Coord coord) {
    TransposedDropout const lane{static_cast<int>(threadIdx.x % 32)};
    // Blocks start at multiples of 16: this thread's place, rounded down to one, plus its place in
    // the block.
    DropoutOctet const octet = mask.octet((row_begin + coord.col(0)) / 16 * 16 + lane.query(),
                                          (key_begin + coord.row(0)) / 16 * 16 + lane.key());
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {
      uint32_t kept[2] = {0, 0};
#pragma unroll
      for (int block = first; block < first + 4 && block < kBlocks; ++block) {
        int const c = block / (kRows / 2) * 4, r = block % (kRows / 2) * 2;
        int const blocks_down = (coord.col(c) - coord.col(0)) / 16;
        int const blocks_right = (coord.row(r) - coord.row(0)) / 16;
        mask.keep_by_parity<kWide>(octet.later(blocks_down, blocks_right), 8 * (block - first),
                                   kept);
      }
      uint32_t const partners = __shfl_sync(0xffffffffu, lane.for_partner(kept), lane.partner());
      word[first / 4] = lane.keep_bits(kept, partners);
    }
  }

  __device__ bool keeps(int r, int c) const { return word_of(r, c) >> bit(r, c) & 1; }

  // Zeroes what was dropped.
  template <class Fragment>
  __device__ void apply(Fragment& x) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!keeps(r, c)) {
          x(r, c) = 0.f;
        }
      }
    }
  }

  // The same for (r, c) and (r, c + 1), in the halves of a word.
  __device__ void apply_to_pair(uint32_t& pair, int r, int c) const {
    pair &= halves_of_bits(word_of(r, c), bit(r, c));
  }

 private:
  __device__ static constexpr int block(int r, int c) { return c / 4 * (kRows / 2) + r / 2; }
  __device__ static constexpr int bit(int r, int c) {
    return block(r, c) % 4 * 8 + (c & 1) + 2 * (r & 1) + 4 * (c >> 1 & 1);
  }
  __device__ uint32_t word_of(int r, int c) const { return word[block(r, c) / 4]; }
};

}  // namespace flash
