// How a tile of keys is taken out of large pages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params/fast_div.h"

namespace flash {

// One of a tile's boxes: what the tile has of a page is a few of 128, 64, 32 and 16 keys, none of
// them twice. Lanes 4 n to 4 n + 3 have those of the tile's n-th page, the last four what is behind
// the sequence's last 16 whole keys: small ones first, for the first may have the last keys.
struct PageBox {
  static constexpr int kSizes = 4, kLargest = 128, kLeast = 16;
  static constexpr int kLanes = 32, kTail = kLanes / kSizes - 1;
  static constexpr int kLeastPage = 64;
  // Of a tile: it is in as many pages, and what is in one is a box of each size at most.
  static constexpr int kMostKeys = std::min((kTail - 1) * kLeastPage, 2 * kLargest - kLeast);
  static constexpr int kMostPage = INT32_MAX / kTail;  // so that a few of them are an int

  int first;  // key of the tile
  int size;   // of keys; 0: the lane has none
  int keys;   // of the sequence, from `first` on, but no more than `size`; may be negative

  FLASH_HD static bool suit(int page_size) {
    return page_size >= kLeastPage && page_size <= kMostPage && page_size % kLeast == 0;
  }

  // Of the sizes, from the largest on.
  FLASH_HD static int size_index(int lane) { return lane % kSizes; }

  // position: the tile's first key; left: keys of the sequence from there on. Both it and tile_keys
  // are multiples of kLeast.
  FLASH_HD PageBox(int lane, int position, int left, int tile_keys, FastDiv const& page) {
    using std::max, std::min;
    int const bit = kLargest >> size_index(lane);
    int const of_page = static_cast<int>(page.divisor), number = lane / kSizes;
    int const in_page = page.remainder(position, page.quotient(position));
    int const whole = min(max(left, 0), tile_keys) & -kLeast;
    bool const is_tail = number == kTail;
    int const begin = is_tail ? whole : min(max(number * of_page - in_page, 0), whole);
    int const end = is_tail ? tile_keys : min((number + 1) * of_page - in_page, whole);
    int const length = end - begin;
    size = length & bit;
    int const smaller = length & (bit - 1);
    first = begin + (is_tail ? smaller : length - size - smaller);
    keys = size > 0 ? min(left - first, size) : 0;
  }
};

}  // namespace flash
