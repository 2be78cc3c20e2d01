#pragma once

#include "launch/variant.h"

namespace flash {

inline constexpr int kMaxDevices = 256;

// Of the current device; asked for once per device.
DeviceInfo const& current_device();

}  // namespace flash
