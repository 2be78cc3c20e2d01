// What happens to a thread's scores on the way from Q·Kᵀ to P·V, for sm80's loop and Hopper's: both
// apply masks, score mods and dropout by these functions.
#pragma once

#include <cute/tensor.hpp>

#include "core/dropout.h"
#include "core/fragment_coord.h"
#include "core/mask.h"
#include "core/score_mod.h"

namespace flash {

// Where all keys exist.
struct AllKeys {
  __device__ uint32_t operator[](int /*word*/) const { return ~uint32_t{0}; }
};

// Which of a thread's kCols keys a row sees, as bits: one instruction makes seven predicates of
// them, where comparisons take one for each score and limit.
template <int kCols>
struct VisibleKeys {
  uint32_t words[(kCols + 31) / 32];

  VisibleKeys() = default;
  // exist: words of bits, in fragment_bits's order: which of the thread's keys exist.
  template <int kWarps, class Words>
  __device__ VisibleKeys(KeyLimits const& keys, int key_begin, FragmentCoord<kWarps> coord,
                         Words const& exist) {
#pragma unroll
    for (int first = 0; first < kCols; first += 32) {
      int const key = key_begin + coord.col(first);
      words[first / 32] = exist[first / 32] & fragment_bits(keys.begin - key, keys.end - key);
    }
  }

  // The others of row r get -inf.
  template <class Scores>
  __device__ void hide_others(Scores& s, int r) const {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      s(r, c) = words[c / 32] >> c % 32 & 1 ? s(r, c) : -INFINITY;
    }
  }
};

// Keys outside a row's limits get -inf. query_of: row of the tile -> query. exist: as above.
template <int kWarps, class Scores, class QueryOf, class Words = AllKeys>
__device__ void apply_mask(Scores& s, SequenceMask const& mask, QueryOf query_of, int key_begin,
                           FragmentCoord<kWarps> coord, Words const& exist = {}) {
  constexpr int kCols = decltype(cute::size<1>(s))::value;
#pragma unroll
  for (int r = 0; r < cute::size<0>(s); ++r) {
    KeyLimits const keys = mask.limits(query_of(coord.row(r)));
    VisibleKeys<kCols>(keys, key_begin, coord, exist).hide_others(s, r);
  }
}

// Calls change(score, r, c) for a thread's scores.
template <class Scores, class Change>
__device__ __forceinline__ void for_each_score(Scores& s, Change change) {
#pragma unroll
  for (int r = 0; r < cute::size<0>(s); ++r) {
#pragma unroll
    for (int c = 0; c < cute::size<1>(s); ++c) {
      s(r, c) = change(s(r, c), r, c);
    }
  }
}

// o *= factor, row by row, for accumulators seen as (rows, columns).
template <class Rows, int kRows>
__device__ __forceinline__ void scale_rows(Rows&& o, float const (&factor)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < cute::size<1>(o); ++c) {
      o(r, c) *= factor[r];
    }
  }
}

// The largest, absolute, in chains that do not wait for each other.
template <class Scores>
__device__ __forceinline__ float largest_score(Scores const& s) {
  constexpr int kChains = 4;
  float tops[kChains] = {};
#pragma unroll
  for (int i = 0; i < cute::size(s); ++i) {
    tops[i % kChains] = fmaxf(tops[i % kChains], fabsf(s(i)));
  }
  return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
}

// The softcap of any products. kByCase: by ScoreMod::cap_by_case.
template <bool kByCase, class Scores>
__device__ __forceinline__ void apply_cap(Scores& s, ScoreMod const& mod) {
  if (mod.has_usual_cap()) {
    for_each_score(s, [&](float product, int, int) { return mod.usual_cap(product); });
  } else {
    for_each_score(s, [&](float product, int, int) {
      return kByCase ? mod.cap_by_case(product) : mod.cap(product);
    });
  }
}

// Scale, softcap and ALiBi, but for the scale that is left to the softmax. The conditions are the
// same for a whole row block, so they stand outside the loops over a thread's scores.
template <bool kCapByCase = false, int kWarps, class Scores>
__device__ void apply_score_mod(Scores& s, ScoreMod const& mod, int row_begin, int key_begin,
                                FragmentCoord<kWarps> coord) {
  if (mod.softcap > 0.f) {
    apply_cap<kCapByCase>(s, mod);
  } else if (!mod.folds_scale()) {
    for_each_score(s, [&](float score, int, int) { return score * mod.softmax_scale; });
  }
  if (mod.alibi_slope != 0.f) {
    // In floating point, where a distance is a sum with a constant, and its sign costs nothing.
    int const diagonal = row_begin + mod.shift - key_begin - coord.col(0);
    float const slope = mod.folded_slope();
    for_each_score(s, [&](float score, int r, int c) {
      float const distance = static_cast<float>(diagonal + coord.row(r)) - coord.col_offset(c);
      return score - slope * fabsf(distance);
    });
  }
}

// The same with nothing but ALiBi, where no key is right of the diagonal: the bias is then a
// constant of the row, which is left to the softmax, plus a term that grows with the column.
template <int kWarps, class Scores, int kRows>
__device__ void apply_left_bias(Scores& s, ScoreMod const& mod, int row_begin, int key_begin,
                                FragmentCoord<kWarps> coord, RowOffsets<kRows>& offsets) {
  int const diagonal = row_begin + mod.shift - key_begin - coord.col(0);
  float const slope = mod.folded_slope();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    offsets.value[r] = -slope * static_cast<float>(diagonal + coord.row(r));
  }
  for_each_score(s, [&](float score, int, int c) { return score + slope * coord.col_offset(c); });
}

// Dropped probabilities become 0; the denominator, summed before, keeps them. A thread holds whole
// dropout octets: rows r, r + 8 and columns c, c + 1, c + 8, c + 9 of each 16 x 16 block.
template <int kWarps, class Probabilities>
__device__ void apply_dropout(Probabilities& p, DropoutMask const& mask, int row_begin,
                              int key_begin, FragmentCoord<kWarps> coord) {
  DropoutOctet const first = mask.octet(row_begin + coord.row(0), key_begin + coord.col(0));
#pragma unroll
  for (int r = 0; r < cute::size<0>(p); r += 2) {
#pragma unroll
    for (int c = 0; c < cute::size<1>(p); c += 4) {
      PhiloxWords const random = mask.draw(first.later(r / 2 * kWarps, c / 4));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        int const in_r = r + w % 2, in_c = c + w / 2 * 2;
        mask.drop(random.word[w], p(in_r, in_c), p(in_r, in_c + 1));
      }
    }
  }
}

}  // namespace flash
