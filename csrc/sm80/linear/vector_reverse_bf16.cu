#include "sm80/linear/vector_launch.h"

namespace flash::sm80::linear {

void launch_vector_reverse_bf16(VectorParams const& p, LaunchContext const& launch) {
  launch_any_vector<LaunchVector, cutlass::bfloat16_t, flash::linear::Order::Reverse>(p, launch);
}

}  // namespace flash::sm80::linear
