// From a request to the row of the table that serves it: the first one that can.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/variant.h"
#include "params/head_dims.h"

namespace flash {

// Whether Hopper's loads can read keys in pages (sm90/forward/pages.h): Boxes if they can.
enum class PageLayout { Any, Boxes };

// The first looks at the page size alone.
PageLayout page_layout(int64_t page_size);
PageLayout page_layout(FwdParams const& params);

// The same for any keys: those that are not in pages are Boxes if their rows can be numbered.
PageLayout key_layout(FwdParams const& params);

// Whether Hopper's loads can end at any key of the call: the rows of all batch entries of keys that
// are not in pages can be numbered, or no sequence ends before its tensor does.
bool has_numbered_keys(FwdParams const& params);

// Whether FLASH_ATTN_ARCH, if set, leaves this family's kernels to calls.
bool allows_family(int arch);

// The rows that serve few queries against a cache.
inline Direction decode_direction(FwdParams const& params) {
  return params.q_latent.ptr ? Direction::Latent : Direction::Decode;
}

// Whether the warps of a row share keys (csrc/wide, sm90/latent): one warp has no registers for all
// columns of O.
inline bool shares_keys(Variant const& variant) {
  bool const reads_cache =
      variant.direction == Direction::Latent || variant.direction == Direction::Decode;
  return reads_cache && is_wide(variant.head_dim, variant.head_dim_v);
}

// Whether only kernels with score mods serve the call: it has some, or odd rows.
inline bool needs_full_scores(FwdParams const& params) {
  return params.scores.has_score_mods() || params.odd.any();
}

// Bits of a number of keys and values: 16, or 8 of codes.
inline int bits_of_keys(FwdParams const& params) { return params.codes.used ? 8 : 16; }

// What a call needs from a kernel.
struct Request {
  Direction direction;
  std::string_view dtype;
  int head_dim;
  int head_dim_v;
  bool full_scores;  // softcap, ALiBi, dropout, or a scale that is not positive
  int sm;
  int smem_per_block;
  PageLayout pages = PageLayout::Any;  // of a paged call
  float softcap = 0.f;                 // of a backward call
  bool max_logits = false;             // of a forward call: whether they are wanted
  int cached_bits = 16;                // of the keys; 8 of codes

  bool operator==(Request const&) const = default;
};

// For the row that a plan is made for, and the one that decodes.
inline Request request_of(FwdParams const& p, Direction direction, std::string_view dtype,
                          bool full_scores, DeviceInfo const& device) {
  return {.direction = direction,
          .dtype = dtype,
          .head_dim = p.head_dim,
          .head_dim_v = p.head_dim_v,
          .full_scores = full_scores,
          .sm = device.sm,
          .smem_per_block = device.smem_per_block,
          .pages = key_layout(p),
          .cached_bits = bits_of_keys(p)};
}

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

// The first row that fits; if none does, throws an error with the request and all rows. The request
// is passed by value: gcc 13 and later suspect that the returned reference is into an argument's
// temporary.
Variant const& select(Request request);

}  // namespace flash
