#pragma once

#include "host/variant.h"

namespace flash {

// Of the current device; asked for once per device.
DeviceInfo const& current_device();

}  // namespace flash
