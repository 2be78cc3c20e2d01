// The launches of a walk with a vector of decays, and which of them Hopper has of its own.
#pragma once

#include "launch/variant.h"
#include "linear/params.h"

namespace flash::linear {

// Those that multiply by the state: every GPU has sm80's, Hopper its own for most K.
struct VectorWalk {
  void (*sums)(VectorParams const&, LaunchContext const&);
  void (*outputs)(VectorParams const&, LaunchContext const&);
};

struct VectorLaunches {
  // keys_only: nothing but what changes the state.
  void (*factors)(VectorParams const&, bool keys_only, LaunchContext const&);
  void (*scan)(VectorParams const&, LaunchContext const&);
  VectorWalk walk;
};

// The first of kVectorTilings with four warps along V, which Hopper's need.
constexpr int kFirstHopperTiling = 1;

// Hopper's, of a dtype and by order.
struct HopperWalks {
  VectorWalk const* bf16;  // [orders]
  VectorWalk const* fp16;
};
// Null where this library has no machine code for Hopper. Defined in the generated registry.
HopperWalks hopper_walks();

}  // namespace flash::linear
