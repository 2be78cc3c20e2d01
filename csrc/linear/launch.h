#pragma once

#include "launch/variant.h"
#include "linear/params.h"
#include "linear/tilings.h"

namespace flash::linear {

// dtype: of q, "bf16" or "fp16". p.k_dim and launch.device decide the tiling; if it is one of
// kWalkTilings, p.sequences are cut into its segments.
void launch_forward(ForwardParams const& p, char const* dtype, LaunchContext const& launch);

// p.forward.sequences are cut into the segments of the tiling that vector_number says.
void launch_vector_forward(VectorParams const& p, char const* dtype, LaunchContext const& launch);

void launch_backward(BackwardParams const& p, char const* dtype, LaunchContext const& launch);

// How the scale of a forward, or of a walk in reverse, is divided.
StateScale forward_scale(float scale);
StateScale reverse_scale(float scale);

// dtype: of p.out, "bf16", "fp16" or "fp32".
void launch_add_parts(PartsParams const& p, char const* dtype, LaunchContext const& launch);

// Segments as in launch_vector_forward.
void launch_vector_backward(VectorBackwardParams const& p, char const* dtype,
                            LaunchContext const& launch);

}  // namespace flash::linear
