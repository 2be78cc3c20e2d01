#pragma once

#include <optional>
#include <utility>

#include "api/tensors.h"
#include "params/decode_params.h"

namespace flash::api {

// Runs the forward kernel that serves the call, on the current device. q is the tensor in p.q.
// num_splits: see host/key_splits.h. of_cache: lengths of keys are less than they may be.
void launch_forward(Tensor const& q, FwdParams p, int64_t num_splits, bool of_cache = false);

// If p has odd rows: copies of k and v, of whole chunks, which it then reads instead. For the
// forward kernels; to be kept until they are launched.
using KeyCopies = std::optional<std::pair<Tensor, Tensor>>;
KeyCopies copy_odd_rows(FwdParams& p, Tensor const& k, Tensor const& v, Tensor const& q);

// The decode kernel. num_splits: see host/decode_plan.h. beside, rows: as of DecodeParams.
void launch_decode(Tensor const& q, FwdParams const& p, int64_t num_splits, bool beside = false,
                   NewRows const& rows = {});

}  // namespace flash::api
