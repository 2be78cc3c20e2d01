#include "linear/launch.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "launch/select.h"
#include "linear/delta_rule.h"
#include "linear/vector_launches.h"

namespace flash {

namespace sm80::linear {
using flash::linear::BackwardParams;
using flash::linear::DeltaParams;
using flash::linear::ForwardParams;
using flash::linear::PartsParams;
using flash::linear::VectorGradientsParams;

void launch_forward_bf16(ForwardParams const&, LaunchContext const&);
void launch_forward_fp16(ForwardParams const&, LaunchContext const&);
void launch_walk_bf16(ForwardParams const&, LaunchContext const&);
void launch_walk_fp16(ForwardParams const&, LaunchContext const&);
extern flash::linear::VectorLaunches const vector_bf16;
extern flash::linear::VectorLaunches const vector_fp16;
extern flash::linear::VectorLaunches const vector_reverse_bf16;
extern flash::linear::VectorLaunches const vector_reverse_fp16;
void launch_vector_gradients_bf16(VectorGradientsParams const&, LaunchContext const&);
void launch_vector_gradients_fp16(VectorGradientsParams const&, LaunchContext const&);
void launch_parts_bf16(PartsParams const&, LaunchContext const&);
void launch_parts_fp16(PartsParams const&, LaunchContext const&);
void launch_parts_fp32(PartsParams const&, LaunchContext const&);
void launch_delta_bf16(DeltaParams const&, LaunchContext const&);
void launch_delta_fp16(DeltaParams const&, LaunchContext const&);
void launch_states_bf16(ForwardParams const&, LaunchContext const&);
void launch_states_fp16(ForwardParams const&, LaunchContext const&);
void launch_gradients_bf16(BackwardParams const&, LaunchContext const&);
void launch_gradients_fp16(BackwardParams const&, LaunchContext const&);
}  // namespace sm80::linear

namespace linear {
namespace {

bool is_bf16(char const* dtype) { return std::string_view(dtype) == "bf16"; }

// The gradients of states are sums like the states', from the last chunk to the first.
ForwardParams gradients_of_states(BackwardParams const& p) {
  ForwardParams of = p.forward;
  of.k = p.forward.q;
  of.v = p.dout;
  of.initial = p.dfinal;
  of.final = p.dinitial;
  of.workspace.states = p.dstates;
  of.order = Order::Reverse;
  return of;
}

// Hopper's launches by the state, if the call, the GPU and this library have them; else null.
VectorWalk const* hopper_walk(VectorParams const& p, bool bf16, DeviceInfo const& device) {
  constexpr int kHopper = 90;
  if (device.sm != kHopper || !allows_family(kHopper) ||
      vector_number(p.forward.k_dim) < kFirstHopperTiling) {
    return nullptr;
  }
  HopperWalks const all = hopper_walks();
  VectorWalk const* const of = bf16 ? all.bf16 : all.fp16;
  return of ? of + static_cast<int>(p.forward.order) : nullptr;
}

VectorLaunches vector_launches(VectorParams const& p, bool bf16, DeviceInfo const& device) {
  using namespace sm80::linear;
  bool const reverse = p.forward.order == Order::Reverse;
  VectorLaunches launches = reverse ? (bf16 ? vector_reverse_bf16 : vector_reverse_fp16)
                                    : (bf16 ? vector_bf16 : vector_fp16);
  if (VectorWalk const* const walk = hopper_walk(p, bf16, device)) {
    launches.walk = *walk;
  }
  return launches;
}

// A walk with a vector of decays: the states before its segments, where a sequence may have
// several, and the outputs if they are wanted.
void launch_vector_walk(VectorParams const& p, bool with_outputs, bool bf16,
                        LaunchContext const& launch) {
  VectorLaunches const launches = vector_launches(p, bf16, launch.device);
  bool const has_segments = p.forward.workspace.sums;
  if (!has_segments && !with_outputs) {
    return;
  }
  launches.factors(p, /*keys_only=*/!with_outputs, launch);
  if (has_segments) {
    launches.walk.sums(p, launch);
    launches.scan(p, launch);
  }
  if (with_outputs) {
    launches.walk.outputs(p, launch);
  }
}

}  // namespace

void launch_forward(ForwardParams const& p, char const* dtype, LaunchContext const& launch) {
  bool const bf16 = is_bf16(dtype);
  if (walk_number(p.k_dim, launch.device.smem_per_block) < kWalkTilingCount) {
    (bf16 ? sm80::linear::launch_walk_bf16 : sm80::linear::launch_walk_fp16)(p, launch);
  } else {
    (bf16 ? sm80::linear::launch_forward_bf16 : sm80::linear::launch_forward_fp16)(p, launch);
  }
}

void launch_vector_forward(VectorParams const& p, char const* dtype, LaunchContext const& launch) {
  launch_vector_walk(p, /*with_outputs=*/true, is_bf16(dtype), launch);
}

void launch_delta(DeltaParams const& p, char const* dtype, LaunchContext const& launch) {
  (is_bf16(dtype) ? sm80::linear::launch_delta_bf16 : sm80::linear::launch_delta_fp16)(p, launch);
}

void launch_backward(BackwardParams const& p, char const* dtype, LaunchContext const& launch) {
  bool const bf16 = is_bf16(dtype);
  auto const states = bf16 ? sm80::linear::launch_states_bf16 : sm80::linear::launch_states_fp16;
  auto const gradients =
      bf16 ? sm80::linear::launch_gradients_bf16 : sm80::linear::launch_gradients_fp16;
  states(p.forward, launch);
  states(gradients_of_states(p), launch);
  gradients(p, launch);
}

StateScale forward_scale(float scale) { return {scale, 1.f, 1.f}; }

// A power of two, as large as keeps the range of what the other half is multiplied by.
StateScale reverse_scale(float scale) {
  constexpr int kMost = 40;
  int exponent = 0;
  std::frexp(scale, &exponent);
  float const unit = std::ldexp(1.f, std::clamp(exponent, -kMost, kMost));
  return {unit, scale / unit, unit};
}

void launch_add_parts(PartsParams const& p, char const* dtype, LaunchContext const& launch) {
  std::string_view const of(dtype);
  auto const launch_parts = of == "fp32"   ? sm80::linear::launch_parts_fp32
                            : of == "bf16" ? sm80::linear::launch_parts_bf16
                                           : sm80::linear::launch_parts_fp16;
  launch_parts(p, launch);
}

void launch_vector_backward(VectorBackwardParams const& p, char const* dtype,
                            LaunchContext const& launch) {
  bool const bf16 = is_bf16(dtype);
  auto const gradients = bf16 ? sm80::linear::launch_vector_gradients_bf16
                              : sm80::linear::launch_vector_gradients_fp16;
  launch_vector_walk(p.dq.walk, /*with_outputs=*/false, bf16, launch);
  launch_vector_walk(p.dk.walk, /*with_outputs=*/true, bf16, launch);
  gradients(p.dq, launch);
  gradients(p.dk, launch);
}

}  // namespace linear
}  // namespace flash
