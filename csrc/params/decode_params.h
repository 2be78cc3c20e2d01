#pragma once

#include <cstdint>

#include "params/append_params.h"
#include "params/fast_div.h"
#include "params/fwd_params.h"
#include "params/split.h"

namespace flash {

// One call with few query rows against a cache. The workspace is there where split.max_splits > 1.
struct DecodeParams {
  FwdParams fwd;
  FastDiv group;     // query heads of a KV head
  FastDiv heads_kv;  // fwd.heads_kv
  SplitSchedule split;
  float* partial_out;  // [pieces, block_m, dv], each piece's rows normalised
  float* partial_lse;  // [pieces, block_m]
  uint32_t* counters;  // [pieces], count pieces that are done: zero before and after a launch
  bool beside;         // runs beside the launch before it, on which it does not depend
  NewRows rows;        // rows that the kernel writes; none: k_cache is null
};

}  // namespace flash
