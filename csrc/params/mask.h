#pragma once

namespace flash {

// Query i sees keys j with i + shift - left <= j <= i + shift + right, shift = seqlen_k - seqlen_q
// (bottom-right alignment). Negative means unbounded; causal is right = 0.
struct Mask {
  int left;
  int right;

  bool operator==(Mask const&) const = default;
};

}  // namespace flash
