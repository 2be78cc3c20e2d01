// How the pieces of a tile become one while no thread block waits: in rounds, in which neighbours
// form groups. The last block of a group to be done merges the group, and stands for it in the next
// round.
#pragma once

#include <cstdint>

#include "params/common.h"

namespace flash {

// Members first, first + stride, … (count of them); their merged result takes the place of `first`.
struct MergeGroup {
  int first;
  int stride;
  int count;
  int counter;  // the split whose counter counts the members that are done; no other group's
};

// The groups that split `split` of `splits` belongs to, round after round. One round would do, but
// where a tile's pieces are large or very many, one thread block alone would read for long.
struct MergeRounds {
  int splits;
  int split;
  int fan_in;  // members of a group, at most; more than there are rounds, so that counters do
  int round = 0;
  int stride = 1;

  FLASH_HD MergeRounds(int splits_, int split_, int fan_in_)
      : splits(splits_), split(split_), fan_in(fan_in_) {}

  FLASH_HD bool valid() const { return stride < splits; }

  // Whether what this round's group becomes is the tile's result.
  FLASH_HD bool last() const { return span() >= splits; }

  FLASH_HD void next() {
    stride = span();
    ++round;
  }

  FLASH_HD MergeGroup group() const {
    int const first = split - split % span();
    int const members = (splits - first - 1) / stride + 1;
    return {first, stride, members < fan_in ? members : fan_in, first + round};
  }

 private:
  // What a group stands for, or the largest int: no more than all pieces.
  FLASH_HD int span() const {
    int64_t const all = int64_t(stride) * fan_in;
    return all < INT32_MAX ? int(all) : INT32_MAX;
  }
};

}  // namespace flash
