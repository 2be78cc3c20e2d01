// The plan of a forward call: its tile, KV splits, the order of tiles, and the predicted time.
#pragma once

#include "params/forward_tile.h"
#include "plan/cost.h"

namespace flash::plan {

// What a plan depends on of a row of the table.
struct ForwardKernel {
  int sm;  // family: 80, 90
  int head_dim;
  int head_dim_v;
  int block_m;
  int block_n;
  int second_block_n;  // 0: there is none
  bool plain;          // neither softcap nor ALiBi nor dropout
  int blocks_per_sm;   // resident CTAs of a multiprocessor
};

inline int block_n_of(ForwardKernel const& kernel, ForwardTile tile) {
  return tile == ForwardTile::Second ? kernel.second_block_n : kernel.block_n;
}

struct ForwardChoice {
  ForwardTile tile;
  int splits;        // 1: none, and nothing to merge
  int side_by_side;  // heads of all sequences (in a varlen batch: of one) whose row blocks run
                     // together

  bool operator==(ForwardChoice const&) const = default;
};

using ForwardPlan = Predicted<ForwardChoice>;

// All choices that are possible and worth a prediction.
std::vector<ForwardPlan> forward_choices(Problem const& p, Machine const& m,
                                         ForwardKernel const& kernel);

// The predicted time of a choice, for the problem's lengths.
double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice);

// The best choice.
ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel);

}  // namespace flash::plan
