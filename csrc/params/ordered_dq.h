#pragma once

namespace flash {

// Ordered dQ accumulation: the first KV block that a row block sees stores its dQ, the next ones
// add to it, and the last one, when all others have added, writes dq. So the preprocess stores no
// zeros, and there is no postprocess.
struct OrderedDq {
  bool used;
  bool deterministic;    // KV blocks between the first and the last add in order, too
  bool computes_delta;   // the main kernel computes D, except for the first heads
  int heads_before = 0;  // these first heads, of all batch entries: the preprocess computes D
};

// Whether kernels of this head dim have room in shared memory to compute D as well.
constexpr bool ordered_dq_computes_delta(int head_dim) { return head_dim <= 192; }

}  // namespace flash
