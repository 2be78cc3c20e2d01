#include "sm80/linear/vector_launch.h"

namespace flash::sm80::linear {

void launch_vector_reverse_fp16(VectorParams const& p, LaunchContext const& launch) {
  launch_any_vector<LaunchVector, cutlass::half_t, flash::linear::Order::Reverse>(p, launch);
}

}  // namespace flash::sm80::linear
