// The plan of a backward call: its schedule, how heads and rows are cut, which tiles run side by
// side, and the predicted time (docs/plan.md).
#pragma once

#include "plan/cost.h"

namespace flash::plan {

// How the CTAs of a backward kernel, or pairs of CTAs, go through KV blocks.
enum class Schedule {
  Tiles,         // a KV block each; its dQ is added to sums in memory, which a pass behind rounds
  KvPersistent,  // all KV blocks of a sequence, one after the other: sums of dQ are the CTA's own
  OrderedDq,     // a KV block each; the first one that a row sees puts its dQ, the last writes it
};

struct BackwardChoice {
  Schedule schedule;
  int heads;         // query heads of a group that a tile takes one after the other
  int row_splits;    // parts that the rows of each tile are cut into; 1: they are whole
  int side_by_side;  // heads whose tiles run together

  bool operator==(BackwardChoice const&) const = default;
};

using BackwardPlan = Predicted<BackwardChoice>;

// What a choice depends on of a row of the table.
struct BackwardKernel {
  int block_m;   // rows of a step
  int block_n;   // keys of a tile
  int head_dim;  // the head dim that it computes with
  int head_dim_v;
  int resident;      // resident CTAs, or pairs of CTAs
  bool hopper;       // computes by wgmma
  bool score_mods;   // has score mods
  bool schedules;    // exists in all three schedules, not as Tiles alone
  bool splits_rows;  // can split the rows of its tiles
};

// All choices that are possible and worth a prediction.
std::vector<BackwardPlan> backward_choices(Problem const& p, Machine const& m,
                                           BackwardKernel const& kernel);

// The best choice. dK and dV get the same bits whether dQ is wanted or not, because the order of a
// tile's steps does not depend on it.
BackwardPlan plan_backward(Problem const& p, Machine const& m, BackwardKernel const& kernel);

}  // namespace flash::plan
