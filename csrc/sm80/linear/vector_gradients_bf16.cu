#include "sm80/linear/vector_gradients_launch.h"

namespace flash::sm80::linear {

void launch_vector_gradients_bf16(VectorGradientsParams const& p, LaunchContext const& launch) {
  launch_any_vector_gradients<cutlass::bfloat16_t>(p, launch);
}

}  // namespace flash::sm80::linear
