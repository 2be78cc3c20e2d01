// How the decode kernel serves a call with few query rows, by its plan (plan/plan.h). The plan
// depends on the row of the table, the call and the GPU alone, never on the lengths, which only the
// device knows.
#pragma once

#include "core/piece_schedule.h"
#include "launch/variant.h"
#include "plan/plan.h"

namespace flash {

// Whether the decode kernel writes the call's new rows as well; otherwise a launch before it does.
bool decode_appends(FwdParams const& params, NewRows const& rows);

PieceSchedule decode_schedule(Variant const& variant, FwdParams const& params,
                              plan::PieceCut const& cut);

// Pieces of a call that are counted in a range that outlives it (launch/counters.h), at most: a
// captured graph keeps its range for ever. A call of more has counters in its workspace, which its
// launch clears; what that takes does not show beside the work of so many pieces.
constexpr int64_t kMostLastingCounters = 1 << 13;

// Floats of what the pieces of the schedule leave behind, and of the counters, if they are there.
int64_t decode_workspace(Variant const& variant, FwdParams const& params,
                         PieceSchedule const& schedule);

// The kernel's parameters, with the workspace in place.
DecodeParams decode_params(Variant const& variant, FwdParams const& params,
                           PieceSchedule const& schedule, float* workspace, bool beside = false,
                           NewRows const& rows = {});

}  // namespace flash
