// A backward call as its plan sees it, and what its kernels are told of the plan.
#pragma once

#include "launch/variant.h"
#include "plan/backward.h"

namespace flash {

plan::Problem problem_of(BwdParams const& params, Variant const& variant, bool deterministic);

plan::BackwardKernel backward_kernel(Variant const& variant, DeviceInfo const& device);

// What is forced, if anything is (launch/force.h), else the plan.
plan::BackwardPlan plan_of(BwdParams const& params, Variant const& variant,
                           DeviceInfo const& device, bool deterministic);

// Thread blocks of the schedule KvPersistent, and where their sums of dQ lie.
KvPersistent kv_persistent(BwdParams const& params, Variant const& variant, DeviceInfo const& device);

// Heads of all batch entries whose D a pass finds before kernels that find the others' themselves.
int heads_found_before(BwdParams const& params, Variant const& variant);

// Of a call whose scores and lengths are in place.
void follow(plan::BackwardChoice const& choice, Variant const& variant, DeviceInfo const& device,
            bool deterministic, BwdParams& params);

}  // namespace flash
