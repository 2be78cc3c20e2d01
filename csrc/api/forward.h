#pragma once

#include "api/tensors.h"
#include "params/decode_params.h"

namespace flash::api {

// Runs the forward kernel that serves the call, on the current device. q is the tensor in p.q.
void launch_forward(Tensor const& q, FwdParams p);

// The decode kernel. num_splits: see host/decode_plan.h. beside: as of DecodeParams.
void launch_decode(Tensor const& q, FwdParams const& p, int64_t num_splits, bool beside = false);

}  // namespace flash::api
