#pragma once

#include "launch/variant.h"

namespace flash {

inline constexpr int kMaxDevices = 256;

// The current device's properties, queried once per device.
DeviceInfo const& current_device();

}  // namespace flash
