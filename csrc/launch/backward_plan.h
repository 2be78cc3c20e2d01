// The plan of a backward call: from the call to the problem and kernel that plan/ knows, and from
// the chosen plan to the parameters of the kernels.
#pragma once

#include "launch/variant.h"
#include "plan/plan.h"

namespace flash {

plan::Problem problem_of(BwdParams const& params, bool deterministic);

plan::Kernel kernel_of_backward(Variant const& variant, DeviceInfo const& device);

// The forced choice if there is one (launch/measuring.h), otherwise the plan.
plan::BackwardPlan backward_plan_of(BwdParams const& params, Variant const& variant,
                                    DeviceInfo const& device, bool deterministic);

// Resident CTAs of the KV-persistent schedule, and where their sums of dQ lie.
KvPersistent kv_persistent(BwdParams const& params, Variant const& variant,
                           DeviceInfo const& device);

// Writes the choice into the parameters of a call whose scores and lengths are in place.
void follow(plan::BackwardChoice const& choice, Variant const& variant, DeviceInfo const& device,
            bool deterministic, BwdParams& params);

}  // namespace flash
