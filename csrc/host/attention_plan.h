// A forward call, also against a cache or pages, as its plan sees it.
#pragma once

#include "host/variant.h"
#include "plan/decode.h"
#include "plan/forward.h"

namespace flash {

// num_splits as in flash_attn_with_kvcache: 0 chooses, 1 never cuts, n is a limit. cached: the call
// is that one.
plan::Problem problem_of(FwdParams const& params, int64_t num_splits, bool cached);

plan::ForwardKernel forward_kernel(Variant const& variant, DeviceInfo const& device);
plan::DecodeKernel decode_kernel(Variant const& variant, FwdParams const& params,
                                 DeviceInfo const& device);

// Whether the decode kernel serves the call, or some sequences of a packed batch, and how it cuts
// their keys.
plan::DecodePlan decode_plan_of(FwdParams const& params, DeviceInfo const& device,
                                int64_t num_splits, bool cached);

// How that row serves the call, or what of it the decode kernel has not.
plan::ForwardPlan forward_plan_of(FwdParams const& params, Variant const& variant,
                                  DeviceInfo const& device, int64_t num_splits, bool cached);

// Writes the choice into what the kernel is told, but for the memory of splits (host/key_splits.h).
void follow(plan::ForwardChoice const& choice, FwdParams& params);

}  // namespace flash
