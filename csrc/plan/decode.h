// The plan of a call with few query rows against long keys: whether the decode kernel or the
// forward serves it, and how the decode kernel's tiles are cut along the keys.
#pragma once

#include "plan/cost.h"

namespace flash::plan {

// The decode kernel of a call: its row of the table, and what follows from it and the GPU.
struct DecodeKernel {
  int head_dim;
  int head_dim_v;
  int block_m;        // rows of a tile: queries times the heads of a KV head
  int unit;           // keys that a CTA takes in a step: block_n * warps
  int rows_at_once;   // rows of a tile that a CTA merges side by side
  int blocks_per_sm;  // by shared memory and registers
  bool clusters;      // there is a kernel whose tiles are shared by clusters of CTAs
};

// How the tiles of a batch are cut along the keys, for SplitSchedule (params/decode_params.h).
struct KeySplit {
  int pieces = 0;        // slices that are wanted, of all sequences
  int extra = 0;         // most slices beside one for each sequence, or row block of a varlen one
  int max_splits = 1;    // pieces of a tile; 1: whole
  int min_units = 1;     // the fewest units of a piece
  int cluster_log2 = 0;  // log2 of the CTAs that share a whole tile

  bool operator==(KeySplit const&) const = default;
};

using DecodeChoice = Predicted<KeySplit>;

struct DecodePlan {
  int few_q;       // the decode kernel computes sequences of up to so many queries; 0: none
  KeySplit split;  // of these sequences
  double us;       // predicted time of the decode kernel, or of the forward if few_q is 0
};

// The most rows of a sequence, all heads of a KV head, for which the decode kernel is considered.
constexpr int kMostDecodeRows = 64;

// The value of few_q if the decode kernel computes all that it can.
int decodable_queries(Problem const& p);

// All choices; none: the decode kernel cannot serve any of the call.
std::vector<DecodeChoice> decode_choices(Problem const& p, Machine const& m,
                                         DecodeKernel const& kernel);

// forward_us: the forward kernel's time if it computes all; infinite if it cannot.
DecodePlan plan_decode(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                       double forward_us);

}  // namespace flash::plan
