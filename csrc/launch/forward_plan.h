// The plan of a forward call, also of one against a cache or pages: from the call to the problem
// and kernel that plan/ knows, and from the chosen plan back to the call.
#pragma once

#include "launch/variant.h"
#include "plan/plan.h"

namespace flash {

// The row of the table that a plan is made for; null: there is none. Rows of both dtypes take the
// same time.
Variant const* row_of_plan(Direction direction, FwdParams const& params, DeviceInfo const& device,
                           bool full_scores);

// num_splits is flash_attn_with_kvcache's: 0 chooses, 1 never cuts, n is a limit. cached: the call
// is flash_attn_with_kvcache.
plan::Problem problem_of(FwdParams const& params, int64_t num_splits, bool cached);

plan::Kernel kernel_of_forward(Variant const& variant, DeviceInfo const& device);

// How the variant serves the call, or those sequences of it that are not decoded.
plan::ForwardPlan forward_plan_of(FwdParams const& params, Variant const& variant,
                                  DeviceInfo const& device, int64_t num_splits, bool cached);

// Writes the choice into the kernel's parameters, except the memory of splits
// (launch/key_splits.h).
void follow(plan::ForwardChoice const& choice, FwdParams& params);

}  // namespace flash
