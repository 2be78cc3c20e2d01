#pragma once

namespace flash {

// Ordered dQ accumulation: of the KV blocks that see a row block, the first stores its dQ, the next
// ones add to it, and the last one, when all others have added, writes dq. So there are no zeros
// before the main kernel and no pass behind it.
struct OrderedDq {
  bool used;
  bool deterministic;    // KV blocks between the first and the last add in order, too
  bool finds_delta;      // the main kernel finds D = rowsum(dO * O), but for the first heads
  int heads_before = 0;  // of all batch entries, whose D a pass finds before
};

// Head dims whose kernels have room in shared memory to find D, beside all that they compute with.
constexpr bool ordered_dq_finds_delta(int head_dim) { return head_dim <= 192; }

}  // namespace flash
