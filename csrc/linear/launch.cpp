#include "linear/launch.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "linear/delta_rule.h"

namespace flash {

namespace sm80::linear {
using flash::linear::BackwardParams;
using flash::linear::DeltaParams;
using flash::linear::ForwardParams;
using flash::linear::PartsParams;
using flash::linear::VectorGradientsParams;
using flash::linear::VectorParams;

void launch_forward_bf16(ForwardParams const&, LaunchContext const&);
void launch_forward_fp16(ForwardParams const&, LaunchContext const&);
void launch_walk_bf16(ForwardParams const&, LaunchContext const&);
void launch_walk_fp16(ForwardParams const&, LaunchContext const&);
void launch_vector_bf16(VectorParams const&, LaunchContext const&);
void launch_vector_fp16(VectorParams const&, LaunchContext const&);
void launch_vector_states_bf16(VectorParams const&, LaunchContext const&);
void launch_vector_states_fp16(VectorParams const&, LaunchContext const&);
void launch_vector_reverse_bf16(VectorParams const&, LaunchContext const&);
void launch_vector_reverse_fp16(VectorParams const&, LaunchContext const&);
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
  (is_bf16(dtype) ? sm80::linear::launch_vector_bf16 : sm80::linear::launch_vector_fp16)(p, launch);
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
  auto const states =
      bf16 ? sm80::linear::launch_vector_states_bf16 : sm80::linear::launch_vector_states_fp16;
  auto const reverse =
      bf16 ? sm80::linear::launch_vector_reverse_bf16 : sm80::linear::launch_vector_reverse_fp16;
  auto const gradients = bf16 ? sm80::linear::launch_vector_gradients_bf16
                              : sm80::linear::launch_vector_gradients_fp16;
  states(p.dq.walk, launch);
  reverse(p.dk.walk, launch);
  gradients(p.dq, launch);
  gradients(p.dk, launch);
}

}  // namespace linear
}  // namespace flash
