#include "sm80/linear/vector_launch.h"

namespace flash::sm80::linear {

using flash::linear::Order;
using flash::linear::VectorLaunches;

extern VectorLaunches const vector_bf16;
VectorLaunches const vector_bf16 =
    VectorLaunchesOf<VectorConfig, cutlass::bfloat16_t, Order::Forward>::all();

}  // namespace flash::sm80::linear
