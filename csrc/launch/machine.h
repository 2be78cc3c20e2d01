// The plan's numbers for a device.
#pragma once

#include "launch/variant.h"
#include "plan/machine.h"

namespace flash {

// The numbers of the measured machine that is most like the device, with the device's own where it
// reports them.
plan::Machine machine_of(DeviceInfo const& device);

}  // namespace flash
