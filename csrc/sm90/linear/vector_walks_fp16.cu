#include "sm90/linear/vector_steps.h"

#include "sm80/linear/vector_launch.h"

namespace flash::sm90::linear {

using flash::linear::kFirstHopperTiling;
using flash::linear::Order;
using flash::linear::VectorWalk;
using Element = cutlass::half_t;

// By order.
extern VectorWalk const vector_walks_fp16[];
VectorWalk const vector_walks_fp16[] = {
    VectorLaunchesOf<WarpgroupConfig, Element, Order::Forward, kFirstHopperTiling>::walk(),
    VectorLaunchesOf<WarpgroupConfig, Element, Order::Reverse, kFirstHopperTiling>::walk()};

}  // namespace flash::sm90::linear
