// The plan of a forward call, also of one against a cache or pages: from the call to the problem
// and kernels that plan/ knows, and from the chosen plan back to the call.
#pragma once

#include "launch/variant.h"
#include "plan/plan.h"

namespace flash {

// num_splits is flash_attn_with_kvcache's: 0 chooses, 1 never cuts, n is a limit. cached: the call
// is flash_attn_with_kvcache.
plan::Problem problem_of(FwdParams const& params, int64_t num_splits, bool cached);

// The same, for decode's plan, which decides by itself whether a forward runs beside it.
plan::Problem decode_problem_of(FwdParams const& params, DeviceInfo const& device,
                                int64_t num_splits, bool cached);

plan::Kernel forward_kernel(Variant const& variant, DeviceInfo const& device);
plan::Kernel decode_kernel(Variant const& variant, FwdParams const& params,
                           DeviceInfo const& device);

// Whether the decode kernel serves the call, or some sequences of a varlen batch, and how it cuts
// their keys. few_q: the value of params.seqlens.few_q for a varlen batch; 0: it serves none.
plan::DecodePlan decode_plan_of(FwdParams const& params, DeviceInfo const& device,
                                int64_t num_splits, bool cached);

// How the variant serves the call, or those sequences of it that are not decoded.
plan::ForwardPlan forward_plan_of(FwdParams const& params, Variant const& variant,
                                  DeviceInfo const& device, int64_t num_splits, bool cached);

// Writes the choice into the kernel's parameters, except the memory of splits
// (launch/key_splits.h).
void follow(plan::ForwardChoice const& choice, FwdParams& params);

}  // namespace flash
