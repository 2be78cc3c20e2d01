// How a tile of keys is loaded from large pages by TMA boxes.
#pragma once

#include <algorithm>

#include "params/fast_div.h"

namespace flash {

// One of a tile's boxes. The keys of the tile that lie in one page are split into boxes of 128, 64,
// 32 and 16 keys, at most one of each size. Lanes 4 n to 4 n + 3 have the boxes of the tile's n-th
// page, and the last four lanes the boxes after the sequence's last 16 whole keys: these go from
// small to large, because the first one may hold the sequence's last keys.
struct PageBox {
  static constexpr int kSizes = 4, kLargest = 128, kLeast = 16;
  static constexpr int kLanes = 32, kTail = kLanes / kSizes - 1;
  static constexpr int kLeastPage = 64;
  // A tile of no more keys fits: it lies in at most kTail pages, and one box of each size is enough
  // for its keys in one of them.
  static constexpr int kMostKeys = std::min((kTail - 1) * kLeastPage, 2 * kLargest - kLeast);
  static constexpr int kMostPage = INT32_MAX / kTail;  // so that kTail pages of keys are an int

  int first;  // the box's first key, counted from the tile's
  int size;   // keys of the box; 0: the lane has none
  int keys;   // the sequence's keys from `first` on, but no more than `size`; may be negative

  FLASH_HD static bool suit(int page_size) {
    return page_size >= kLeastPage && page_size <= kMostPage && page_size % kLeast == 0;
  }

  // Index of the lane's box size, from the largest on.
  FLASH_HD static int size_index(int lane) { return lane % kSizes; }

  // position: the tile's first key; left: keys of the sequence from there on. position and
  // tile_keys are multiples of kLeast.
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
