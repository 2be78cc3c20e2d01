// How the pieces of a tile are merged without any CTA waiting. Merging goes in rounds: neighbours
// form sets, and the CTA of a set that is done last merges the set and represents it in the
// next round.
#pragma once

#include "params/common.h"

namespace flash {

// Rows that one CTA merges in a round. At d 128 these are 160 KiB, which it reads in 1.5 µs, as
// long as a round itself takes. They are 20 pieces of 16 rows, so that two rounds merge a tile with
// a piece for every resident CTA of an H200.
constexpr int kMergedRows = 320;

// Members first, first + stride, … (count of them); their merged result takes the place of `first`.
struct MergeSet {
  int first;
  int stride;
  int count;
  int counter;  // the piece whose counter counts this set's finished members, and no other's
};

// The sets that piece number `piece` of `pieces` belongs to, round after round. One round would do,
// but where a tile's pieces are large or very many, one CTA alone would read for long.
struct MergeRounds {
  int pieces;
  int piece;
  int fan_in;  // members of a set, at most; exceeds the rounds, so that each set has a counter
  int round = 0;
  int stride = 1;

  FLASH_HD MergeRounds(int pieces_, int piece_, int fan_in_)
      : pieces(pieces_), piece(piece_), fan_in(fan_in_) {}

  FLASH_HD bool valid() const { return stride < pieces; }

  // Whether this round's merged set is the tile's result.
  FLASH_HD bool last() const { return span() >= pieces; }

  FLASH_HD void next() {
    stride = span();
    ++round;
  }

  FLASH_HD MergeSet set() const {
    int const first = piece - piece % span();
    int const members = (pieces - first - 1) / stride + 1;
    return {first, stride, members < fan_in ? members : fan_in, first + round};
  }

 private:
  // Pieces that a set stands for, or the largest int, which is at least all pieces.
  FLASH_HD int span() const {
    int64_t const all = int64_t(stride) * fan_in;
    return all < INT32_MAX ? int(all) : INT32_MAX;
  }
};

}  // namespace flash
