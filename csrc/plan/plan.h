// The ways to serve a call in each direction, their predicted times, and the best one
// (docs/plan.md). Choices are those that are possible and worth a prediction, the simpler ones
// first.
#pragma once

#include <limits>
#include <vector>

#include "params/forward_tile.h"
#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

// A way to serve a call, and the time that is predicted for it.
template <class Choice>
struct Predicted {
  Choice choice;
  double us;
};

// How the CTAs of a backward kernel, or clusters, go through KV blocks.
enum class Schedule {
  Tiles,         // a KV block each; its dQ is added to sums in memory, which the postprocess rounds
  KvPersistent,  // all KV blocks of a KV head, or GQA split, of one sequence, one after the other:
                 // sums of dQ are the CTA's own
  OrderedDq,     // a KV block each; the first one that a row sees puts its dQ, the last writes it
};

struct BackwardChoice {
  Schedule schedule;
  int heads;         // query heads of a group that a tile takes one after the other
  int row_splits;    // parts that the rows of each tile are cut into; 1: they are whole
  int side_by_side;  // KV heads, or their GQA splits, whose tiles run together

  bool operator==(BackwardChoice const&) const = default;
};

using BackwardPlan = Predicted<BackwardChoice>;

// Whether the main kernel of ordered dQ computes D, except for the first heads.
bool computes_delta(Problem const& p, int head_dim);

// Heads, of all batch entries, whose D the preprocess computes there: those that tiles come to
// first, and so many that the D of all others, which the main kernel's delta warps compute, is
// there in time.
int heads_computed_before(Problem const& p, Kernel const& k, int side_by_side);

std::vector<BackwardPlan> backward_choices(Problem const& p, Machine const& m, Kernel const& k);

// dK and dV get the same bits whether dQ is wanted or not, because the order of a tile's steps does
// not depend on it.
BackwardPlan plan_backward(Problem const& p, Machine const& m, Kernel const& k);

struct ForwardChoice {
  ForwardTile tile;
  int splits;        // 1: none, and nothing to merge
  int side_by_side;  // heads of all sequences (in a varlen batch: of one) whose row blocks run
                     // together

  bool operator==(ForwardChoice const&) const = default;
};

using ForwardPlan = Predicted<ForwardChoice>;

std::vector<ForwardPlan> forward_choices(Problem const& p, Machine const& m, Kernel const& k);

// The predicted time of any choice, for the problem's lengths; for tests.
double predicted_us(Problem const& p, Machine const& m, Kernel const& k,
                    ForwardChoice const& choice);

// The time of the pass that makes codes of queries.
double query_codes_us(Problem const& p, Machine const& m);

ForwardPlan plan_forward(Problem const& p, Machine const& m, Kernel const& k);

// The number of slices where no number is wanted: max_pieces alone limits them.
constexpr int kAnySlices = std::numeric_limits<int>::max();

// How the tiles of the decode kernel are cut along the keys, for PieceSchedule
// (params/decode_params.h).
struct PieceCut {
  int slices = 0;        // that are wanted, of all sequences
  int extra = 0;         // at most so many slices more than sequences (varlen: than row blocks)
  int max_pieces = 1;    // pieces of a tile; 1: whole
  int min_units = 1;     // the fewest units of a piece
  int cluster_log2 = 0;  // log2 of the CTAs that share a whole tile

  bool operator==(PieceCut const&) const = default;
};

using DecodeChoice = Predicted<PieceCut>;

struct DecodePlan {
  int few_q;     // the decode kernel computes sequences of up to so many queries; 0: none
  PieceCut cut;  // of these sequences
  double us;     // predicted time of the decode kernel, or of the forward if few_q is 0
};

// The most row blocks, of block_m rows, that so many queries of so many sequences of a varlen batch
// can have: every sequence with queries has a last row block, which may lack the rows of whole
// queries.
int64_t most_row_blocks(int64_t total_q, int64_t sequences, int group, int block_m);

// The value of few_q if the decode kernel computes all that it can.
int decodable_queries(Problem const& p);

// None: the decode kernel cannot serve any of the call.
std::vector<DecodeChoice> decode_choices(Problem const& p, Machine const& m, Kernel const& k);

// forward_us: the forward kernel's time if it computes all; infinite if it cannot.
DecodePlan plan_decode(Problem const& p, Machine const& m, Kernel const& k, double forward_us);

}  // namespace flash::plan
