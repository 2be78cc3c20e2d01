// problem → variant
#pragma once

#include <string>
#include <vector>

#include "launch/variant.h"

namespace flash {

// Of keys in pages: whether Hopper's loads can read them (sm90/forward/pages.h).
enum class PageLayout { Any, Boxes };

// As far as the page size says.
PageLayout page_layout(int64_t page_size);
PageLayout page_layout(FwdParams const& params);

// What a call needs from a kernel.
struct Request {
  Direction direction;
  char const* dtype;
  int head_dim;
  int head_dim_v;
  bool full_scores;  // softcap, ALiBi, dropout, or a scale that is not positive
  int sm;
  int smem_per_block;
  PageLayout pages = PageLayout::Any;  // of a paged one
  float softcap = 0.f;                 // of a backward one
};

struct Rejection {
  Variant const* variant;
  std::string why;
};

struct Selection {
  Variant const* variant;  // null: none fits
  std::vector<Rejection> rejected;
};

// The first row of the table that fits, and why the others do not.
Selection explain(Request const& request);

// The first row that fits, or null.
Variant const* find(Request const& request);

// The first row that fits; throws what was asked and what exists if none does. The request comes by
// value: gcc 13 and later suspect that a reference returned is one into an argument's temporary.
Variant const& select(Request request);

}  // namespace flash
