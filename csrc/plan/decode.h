// How a call with few query rows against long keys is served: by the decode kernel or the forward,
// and how the decode kernel's tiles are cut along the keys.
#pragma once

#include <cstdint>

#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

// The decode kernel of a call: its row of the table, and what follows from it and the GPU.
struct DecodeKernel {
  int head_dim;
  int head_dim_v;
  int block_m;        // rows of a tile: queries times the heads of a KV head
  int unit;           // keys that a thread block takes at a step: block_n * warps
  int rows_at_once;   // of a tile that a thread block merges side by side
  int merged_rows;    // rows of parts that it merges in one round
  int blocks_per_sm;  // by shared memory and registers
  bool clusters;      // there is a kernel whose tiles are shared by clusters of thread blocks
};

// How the tiles of a batch are cut along the keys: what SplitSchedule (params/split.h) is told.
struct KeySplit {
  int pieces = 0;        // of all sequences, for each tile, as many as are wanted
  int extra = 0;         // beside one for each sequence, or row block of a packed one, at most
  int max_splits = 1;    // pieces of a tile; 1: whole
  int min_units = 1;     // of a piece
  int cluster_log2 = 0;  // of the thread blocks that share a whole tile

  bool operator==(KeySplit const&) const = default;
};

struct DecodeChoice {
  KeySplit split;
  double us;  // predicted
};

struct DecodePlan {
  int few_q;       // sequences of up to so many queries are the decode kernel's; 0: none
  KeySplit split;  // of those
  double us;       // predicted: of the decode kernel, or if it has nothing, of the forward
};

// Rows of a sequence, all heads of a KV head, that the decode kernel is worth a thought for.
constexpr int kMostDecodeRows = 64;

// The same problem with the lengths to expect where only the device knows them. What is compared
// is predicted for these.
Problem expected(Problem const& p);

// Predicted: of the decode kernel alone, if it has all sequences.
double decode_us(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                 KeySplit const& split);

// All choices; returns how many there are. None: the decode kernel cannot serve any of the call.
constexpr int kMostDecodeChoices = 16;
int decode_choices(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                   DecodeChoice* choices);

// What few_q is if the decode kernel has what it can have.
int decodable_queries(Problem const& p);

// forward_us: of the forward kernel, if it has all: the geometric mean of what is predicted for
// expected(p) and for full caches; infinite if it cannot.
DecodePlan plan_decode(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                       double forward_us);

}  // namespace flash::plan
