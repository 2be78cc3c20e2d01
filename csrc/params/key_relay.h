#pragma once

namespace flash {

// Whether the key blocks that see a row block hand its sum of dQ on, like runners: the first puts
// what the others add to, and the last one, when all have been there, takes it and writes dq. So
// there are no zeros before the main kernel and no pass behind it.
struct KeyRelay {
  bool used;
  bool in_order;  // those between the first and the last, too: the call is deterministic
};

}  // namespace flash
