// The plan of a call that the decode kernel may serve: from the call to the problem and kernel that
// plan/ knows. launch/decode_schedule.h turns it into the kernel's parameters.
#pragma once

#include "launch/forward_plan.h"

namespace flash {

// problem_of, for decode's plan, which decides by itself whether a forward runs beside it.
plan::Problem decode_problem_of(FwdParams const& params, DeviceInfo const& device,
                                int64_t num_splits, bool cached);

plan::Kernel kernel_of_decode(Variant const& variant, FwdParams const& params,
                              DeviceInfo const& device);

// Whether the decode kernel serves the call, or some sequences of a varlen batch, and how it cuts
// their keys. few_q: the value of params.seqlens.few_q for a varlen batch; 0: it serves none.
plan::DecodePlan decode_plan_of(FwdParams const& params, DeviceInfo const& device,
                                int64_t num_splits, bool cached);

}  // namespace flash
