// The generator's state for one call with dropout.
#pragma once

#include "api/tensors.h"
#include "params/scores.h"

namespace flash::api {

// int64 (2) = [seed, offset] from torch's default generator of q's device. It is drawn on the
// device, so that nothing waits and a captured graph draws anew at each replay.
Tensor draw_rng_state(Tensor const& q);

// The caller's state, checked to be on q's device and int64 (2), or (2 + 3 * batch) for a part of a
// larger call; contiguous, as kernels read it.
Tensor checked_rng_state(Tensor const& rng_state, int batch, Tensor const& q);

// The origins that follow the generator's state if the call is a part of a larger one; otherwise
// null.
DropoutOrigin const* dropout_origins(Tensor const& rng_state);

}  // namespace flash::api
