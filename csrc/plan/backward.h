// How a backward call is served: in which schedule, with which tiles side by side, and what it
// takes.
#pragma once

#include <cstdint>

#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

// How the thread blocks of a backward kernel, or pairs of them, go through blocks of keys.
enum class Schedule {
  Tiles,         // a KV block each; its dQ is added to sums in memory, which a pass behind rounds
  KvPersistent,  // all KV blocks of a sequence, one after the other: sums of dQ are its own
  OrderedDq,     // a KV block each; the first one that sees a row puts its dQ, the last writes it
};

struct BackwardChoice {
  Schedule schedule;
  int heads;      // query heads of a group that a tile takes one after the other
  int row_parts;  // that the rows of each tile are cut into; 1: they are whole
  int side_by_side;  // heads whose tiles run together

  bool operator==(BackwardChoice const&) const = default;
};

// A row of the table, as far as a choice depends on it.
struct BackwardKernel {
  int block_m;   // rows of a step
  int block_n;   // keys of a tile
  int head_dim;  // that it computes with
  int head_dim_v;
  int resident;    // thread blocks, or pairs of them, that run at a time
  bool hopper;     // of wgmma
  bool hooks;      // of the full level
  bool schedules;  // is there in all three schedules, not as Tiles alone
  bool cuts_rows;  // can cut the rows of its tiles
};

struct BackwardPlan {
  BackwardChoice choice;
  double us;              // predicted
  BackwardChoice second;  // what would be next
  double second_us;       // 0: nothing else is possible
};

// Predicted µs of a choice.
double backward_us(Problem const& p, Machine const& m, BackwardKernel const& kernel,
                   BackwardChoice const& choice);

// At most so many are possible.
constexpr int kMostBackwardChoices = 64;

// Writes all that are possible to `choices`; their number.
int backward_choices(Problem const& p, BackwardKernel const& kernel, BackwardChoice* choices);

// The choice of least predicted time. dK and dV get the same bits whether dQ is wanted or not: what
// a tile goes through does not depend on it.
BackwardPlan plan_backward(Problem const& p, Machine const& m, BackwardKernel const& kernel);

}  // namespace flash::plan
