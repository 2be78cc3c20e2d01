#pragma once

#include "core/tile_grid.h"
#include "core/tile_queue.h"
#include "params/bwd_params.h"
#include "sm90/backward/lone_mods.h"
#include "sm90/tensor_map.h"

namespace flash::sm90::backward {

// What a launch passes to the kernel.
struct BackwardArgs {
  TensorMap q;  // boxes of kBlockM rows
  TensorMap dout;
  TensorMap k;  // boxes of kBlockN keys
  TensorMap v;
  TensorMap delta_dout;  // for delta warps: boxes of kDeltaRows rows
  TensorMap delta_out;
  BwdParams params;
  TileGrid grid;
  TileQueue queue;
  NearTanhMod near_tanh;  // for a softcap
};

}  // namespace flash::sm90::backward
