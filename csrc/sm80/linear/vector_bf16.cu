#include "sm80/linear/vector_launch.h"

namespace flash::sm80::linear {

using flash::linear::Order;

void launch_vector_bf16(VectorParams const& p, LaunchContext const& launch) {
  launch_any_vector<LaunchVector, cutlass::bfloat16_t, Order::Forward>(p, launch);
}

void launch_vector_states_bf16(VectorParams const& p, LaunchContext const& launch) {
  launch_any_vector<LaunchVectorStates, cutlass::bfloat16_t, Order::Forward>(p, launch);
}

}  // namespace flash::sm80::linear
