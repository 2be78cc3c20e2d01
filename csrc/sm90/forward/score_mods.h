// Score mods: what happens to a warpgroup's scores beside the softmax. Each of the usual mods,
// alone, has a loop over the keys of its own, which does not test for other mods and keeps what it
// needs in registers: between two products a test costs 30 clocks, and a read of shared memory as
// much.
//
// A class of score mods has
//   kAny              whether there are any
//   Offsets           what its scores lack (core/softmax.h)
//   on_scores         products (rows, columns) -> scores, but for the scale that is left to the
//                     softmax's exponent
//   on_probabilities  what dropout does
#pragma once

#include "core/score_fragments.h"
#include "sm90/forward/row_block.h"

namespace flash::sm90::forward {

using Coord = FragmentCoord<4>;

struct NoScoreMods {
  static constexpr bool kAny = false;
  using Offsets = NoOffsets;

  template <class Scores>
  __device__ void on_scores(Scores&, int /*key_begin*/, Coord, Offsets&) const {}
  template <class Probabilities>
  __device__ void on_probabilities(Probabilities&, int /*key_begin*/, Coord) const {}
};

// A softcap alone, with a usual cap.
struct SoftcapMod : NoScoreMods {
  static constexpr bool kAny = true;
  ScoreMod mod;
  SmallCap small;

  __device__ explicit SoftcapMod(ScoreMod const& mod_) : mod(mod_), small(mod_) {}

  template <class Scores>
  __device__ __forceinline__ void on_scores(Scores& s, int /*key_begin*/, Coord, Offsets&) const {
    if (__any_sync(0xffffffffu, largest_score(s) > small.limit)) {
      for_each_score(s, [&](float product, int, int) { return mod.usual_cap(product); });
    } else {
      for_each_score(s, [&](float product, int, int) { return small(product); });
    }
  }
};

// ALiBi where no key is right of the diagonal.
struct LeftBiasMod : NoScoreMods {
  static constexpr bool kAny = true;
  using Offsets = RowOffsets<2>;
  ScoreMod mod;
  int row_begin;

  __device__ LeftBiasMod(ScoreMod const& mod_, int row_begin_) : mod(mod_), row_begin(row_begin_) {}

  template <class Scores>
  __device__ __forceinline__ void on_scores(Scores& s, int key_begin, Coord coord,
                                            Offsets& offsets) const {
    apply_left_bias(s, mod, row_begin, key_begin, coord, offsets);
  }
};

struct DropoutMod : NoScoreMods {
  static constexpr bool kAny = true;
  DropoutMask mask;
  int row_begin;

  __device__ DropoutMod(DropoutMask const& mask_, int row_begin_)
      : mask(mask_), row_begin(row_begin_) {}

  template <class Probabilities>
  __device__ __forceinline__ void on_probabilities(Probabilities& p, int key_begin,
                                                   Coord coord) const {
    apply_dropout(p, mask, row_begin, key_begin, coord);
  }
};

// Several score mods, a large softcap, ALiBi with keys on both sides, or a scale that the exponent
// cannot take.
template <class Config>
struct AnyScoreMods {
  static constexpr bool kAny = true;
  using Offsets = RowOffsets<2>;
  RowBlock<Config> const& block;
  int warpgroup;

  __device__ int row_begin() const { return block.row_begin + warpgroup * kWarpgroupRows; }

  // Whether none of these keys is right of any row's diagonal.
  __device__ bool is_left(int key_begin) const {
    int const shift = block.score_mod.shift;
    return block.mask.right <= shift || key_begin + Config::kBlockN <= row_begin() + shift;
  }

  template <class Scores>
  __device__ __forceinline__ void on_scores(Scores& s, int key_begin, Coord coord,
                                            Offsets& offsets) const {
    ScoreMod const& mod = block.score_mod;
    if (mod.alibi_slope != 0.f && mod.folds_scale() && is_left(key_begin)) {
      apply_left_bias(s, mod, row_begin(), key_begin, coord, offsets);
    } else {
      apply_score_mod(s, mod, row_begin(), key_begin, coord);
    }
  }

  template <class Probabilities>
  __device__ __forceinline__ void on_probabilities(Probabilities& p, int key_begin,
                                                   Coord coord) const {
    if (block.drops) {
      apply_dropout(p, block.dropout, row_begin(), key_begin, coord);
    }
  }
};

}  // namespace flash::sm90::forward
