#include "sm80/linear/vector_launch.h"

namespace flash::sm80::linear {

using flash::linear::Order;
using flash::linear::VectorLaunches;

extern VectorLaunches const vector_reverse_fp16;
VectorLaunches const vector_reverse_fp16 =
    VectorLaunchesOf<VectorConfig, cutlass::half_t, Order::Reverse>::all();

}  // namespace flash::sm80::linear
