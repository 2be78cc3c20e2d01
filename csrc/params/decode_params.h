#pragma once

#include <cstdint>

#include "params/fast_div.h"
#include "params/fwd_params.h"
#include "params/split.h"

namespace flash {

// How a launch is ordered behind the one before it in its stream.
enum class Before {
  Ends,   // ordinarily
  Reads,  // may start early; before it reads keys and queries, all of that has to be written
  Runs,   // may start early, and has nothing to do with it
};

// One call with few query rows against a cache. The workspace is there where split.max_splits > 1.
struct DecodeParams {
  FwdParams fwd;
  FastDiv group;     // query heads of a KV head
  FastDiv heads_kv;  // fwd.heads_kv
  SplitSchedule split;
  float* partial_out;  // [pieces, block_m, dv], each piece's rows normalised
  float* partial_lse;  // [pieces, block_m]
  uint32_t* counters;  // [pieces] if this call has to bring its own
  Before before = Before::Ends;
};

}  // namespace flash
