// What happens to a thread's scores on the way from Q·Kᵀ to P·V. Hooks never touch the main loop.
#pragma once

#include <cute/tensor.hpp>

#include "core/dropout.h"
#include "core/fragment_coord.h"
#include "core/mask.h"
#include "core/score_mod.h"

namespace flash {

// Keys outside a row's limits get -inf. By bits, of which one instruction makes seven predicates;
// comparisons take one for each score and limit.
template <int kWarps, class Scores>
__device__ void apply_mask(Scores& s, SequenceMask const& mask, int row_begin, int key_begin,
                           FragmentCoord<kWarps> coord) {
#pragma unroll
  for (int r = 0; r < cute::size<0>(s); ++r) {
    KeyLimits const keys = mask.limits(row_begin + coord.row(r));
#pragma unroll
    for (int first = 0; first < cute::size<1>(s); first += 32) {
      int const key = key_begin + coord.col(first);
      uint32_t const visible = fragment_bits(keys.begin - key, keys.end - key);
#pragma unroll
      for (int c = first; c < first + 32 && c < cute::size<1>(s); ++c) {
        s(r, c) = visible >> (c - first) & 1 ? s(r, c) : -INFINITY;
      }
    }
  }
}

// Scale, softcap and ALiBi, unless the scale is all there is. The conditions are the same for a
// whole row block, so they stand outside the loops over a thread's scores.
template <int kWarps, class Scores>
__device__ void apply_score_mod(Scores& s, ScoreMod const& mod, int row_begin, int key_begin,
                                FragmentCoord<kWarps> coord) {
  if (mod.scales_only()) {
    return;
  }
  auto const for_each = [&](auto change) {
#pragma unroll
    for (int r = 0; r < cute::size<0>(s); ++r) {
#pragma unroll
      for (int c = 0; c < cute::size<1>(s); ++c) {
        s(r, c) = change(s(r, c), r, c);
      }
    }
  };
  bool const capped = mod.softcap > 0.f;
  if (capped) {
    for_each([&](float score, int, int) { return mod.cap(score); });
  }
  if (mod.alibi_slope != 0.f || !capped) {
    float const scale = capped ? 1.f : mod.softmax_scale;
    // In floating point, where a distance is a sum with a constant, and its sign costs nothing.
    int const diagonal = row_begin + mod.shift - key_begin - coord.col(0);
    for_each([&](float score, int r, int c) {
      float const distance = static_cast<float>(diagonal + coord.row(r)) - coord.col_offset(c);
      return score * scale + mod.bias(distance);
    });
  }
}

// Dropped probabilities become 0; the denominator, summed before, keeps them. A thread holds whole
// dropout groups: rows r, r + 8 and columns c, c + 1, c + 8, c + 9 of each 16 x 16 block.
template <int kWarps, class Probabilities>
__device__ void apply_dropout(Probabilities& p, DropoutMask const& mask, int row_begin,
                              int key_begin, FragmentCoord<kWarps> coord) {
  DropoutGroup const first = dropout_group(row_begin + coord.row(0), key_begin + coord.col(0));
#pragma unroll
  for (int r = 0; r < cute::size<0>(p); r += 2) {
#pragma unroll
    for (int c = 0; c < cute::size<1>(p); c += 4) {
      uint32_t const keep = mask.keep_bits(first.later(r / 2 * kWarps, c / 4));
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) {
        int const in_r = bit >> 1 & 1, in_c = (bit & 1) + (bit >> 2) * 2;
        if (!(keep >> bit & 1)) {
          p(r + in_r, c + in_c) = 0.f;
        }
      }
    }
  }
}

}  // namespace flash
