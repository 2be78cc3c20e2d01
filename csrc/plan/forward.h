// How a forward is served by the forward kernels: which tile, what is cut into splits, in which
// order tiles run, and how long that takes.
#pragma once

#include <cstdint>

#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

// What a row block is, and how many keys it takes at a step.
enum class ForwardTile {
  First,   // rows of one query head, the row's block_n keys
  Second,  // the same, second_block_n keys
  Packed,  // pack-GQA: queries with all heads that share a KV head, block_n keys
  Split,   // pack-GQA whose keys are cut into splits, which are merged by a launch of their own
};

// A row of the table, as far as a plan differs by it.
struct ForwardKernel {
  int sm;  // family: 80, 90
  int head_dim;
  int head_dim_v;
  int block_m;
  int block_n;
  int second_block_n;  // 0: there is none
  bool plain;          // neither softcap nor ALiBi nor dropout
  int blocks_per_sm;   // thread blocks that run at a time on a multiprocessor
};

struct ForwardChoice {
  ForwardTile tile;
  int splits;        // 1: none, and nothing to merge
  int side_by_side;  // heads of all sequences (of a packed batch: of one) whose row blocks run
                     // together
};

struct ForwardPlan {
  ForwardChoice choice;
  double us;          // predicted
  int64_t workspace;  // bytes: results of splits, fp32
};

// Whether the row has a kernel for it. beside: the decode kernel has the batch's short sequences at
// the same time.
bool is_possible(Problem const& p, ForwardKernel const& kernel, ForwardTile tile, bool beside);

// The predicted time of a choice, for the lengths that the problem tells.
double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice);

// The choice of the least predicted time; a simpler one wins within 1%. Of a cache the lengths to
// expect are to be told (plan/decode.h, expected), not its capacity.
ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                         bool beside = false);

}  // namespace flash::plan
