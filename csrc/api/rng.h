// The generator's state for one call with dropout.
#pragma once

#include "api/tensors.h"
#include "params/scores.h"

namespace flash::api {

// int64 (2) = [seed, offset] from torch's default generator of q's device: drawn on the device, so
// that nothing waits and a captured graph draws anew at each replay.
Tensor draw_rng_state(Tensor const& q);

// The caller's, if it is int64 (2), or of a part of a larger call (2 + 3 * batch), on q's device;
// contiguous, as kernels read it.
Tensor checked_rng_state(Tensor const& rng_state, int batch, Tensor const& q);

// What follows the generator's state in that of a part; null in that of a whole call.
DropoutOrigin const* dropout_origins(Tensor const& rng_state);

}  // namespace flash::api
