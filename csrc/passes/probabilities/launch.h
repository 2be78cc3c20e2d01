#pragma once

#include "launch/variant.h"

namespace flash {

// Fills s_dmask [b, h, sq, sk], contiguous and of q's dtype, from q, k and the LSE that a forward
// launch on the same stream writes.
void launch_probabilities(FwdParams const& params, char const* dtype, void* s_dmask,
                          LaunchContext const& launch);

}  // namespace flash
