#pragma once

namespace flash {

// Whether the key blocks that see a row block hand its sum of dQ on, like runners: the first puts
// what the others add to, and the last one, when all have been there, takes it and writes dq. So
// there are no zeros before the main kernel and no pass behind it.
struct KeyRelay {
  bool used;
  bool in_order;         // those between the first and the last, too: the call is deterministic
  bool finds_delta;      // the main kernel finds D = rowsum(dO * O), but for the first heads
  int heads_before = 0;  // of all batch entries, whose D a pass finds before
};

// Head dims whose relays have room in shared memory to find D, beside all that they compute with.
constexpr bool relay_finds_delta(int head_dim) { return head_dim <= 192; }

}  // namespace flash
