// The largest logit of each row, for callers that ask for it. The maximum that the softmax keeps is
// not it: that one stays until scores exceed it by far (core/softmax.h).
#pragma once

#include "core/softmax.h"

namespace flash {

// Bits whose order as ints is that of all floats, negative ones included, and back.
FLASH_HD int sortable_bits(float x) {
  int const bits = ordered_bits(x);
  return bits ^ (bits >> 31 & INT32_MAX);
}
FLASH_HD float from_sortable_bits(int bits) {
  return from_ordered_bits(bits ^ (bits >> 31 & INT32_MAX));
}

// A row's largest logit, from its largest score in the units that the softmax gets. Rows that saw
// no key have none.
template <int kRows>
FLASH_HD float largest_logit(OnlineSoftmax<kRows> const& softmax, int r, float top, float scale) {
  return softmax.saw_key(r) ? top * scale : -INFINITY;
}

}  // namespace flash
