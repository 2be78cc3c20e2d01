// How a forward is served by the forward kernels: which tile, what is cut into splits, in which
// order tiles run, and how long that takes.
#pragma once

#include <cstdint>

#include "params/forward_tile.h"
#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

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

inline int block_n_of(ForwardKernel const& kernel, ForwardTile tile) {
  return tile == ForwardTile::Second ? kernel.second_block_n : kernel.block_n;
}

struct ForwardChoice {
  ForwardTile tile;
  int splits;        // 1: none, and nothing to merge
  int side_by_side;  // heads of all sequences (of a packed batch: of one) whose row blocks run
                     // together

  bool operator==(ForwardChoice const&) const = default;
};

struct ForwardPlan {
  ForwardChoice choice;
  double us;          // predicted
  int64_t workspace;  // bytes: results of splits, fp32
};

// Keys of a tile for which a row's first kernel loads pages; a longer one has a kernel of its own.
constexpr int kMostPagedKeys = 128;

// Whether the row has a kernel for it that may serve the call.
bool is_possible(Problem const& p, ForwardKernel const& kernel, ForwardTile tile);

// All choices; returns how many there are.
constexpr int kMostForwardChoices = 128;
int forward_choices(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                    ForwardChoice* choices);

// The predicted time of a choice, for the lengths that the problem tells.
double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice);

// The choice of the least predicted time; a simpler one wins within 1%. Of a cache the lengths to
// expect are to be told (plan/decode.h, expected), not its capacity.
ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel);

}  // namespace flash::plan
