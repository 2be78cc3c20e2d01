// The numbers of the GPU at hand.
#pragma once

#include "launch/variant.h"
#include "plan/machine.h"

namespace flash {

// Of the measured machine that is most like it, with what the device says of itself.
plan::Machine machine_of(DeviceInfo const& device);

}  // namespace flash
