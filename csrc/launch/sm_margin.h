// SMs that a call leaves to others, such as a collective that runs beside it.
#pragma once

#include <cstdint>

#include "launch/variant.h"

namespace flash {

// How many of a GPU's SMs a call takes that leaves so many to others: a few at least.
int sms_left(int sms, int64_t margin);

// While this lives, the thread's calls take the GPU for one with so many SMs less: launches that
// fill it once leave these alone. Others have as many CTAs as tiles, wherever they find room.
class SmMargin {
 public:
  explicit SmMargin(int64_t sms);
  ~SmMargin();
  SmMargin(SmMargin const&) = delete;
  SmMargin& operator=(SmMargin const&) = delete;

 private:
  int64_t const before_;
};

// The device without the thread's margin; the same as long as the margin and the thread's current
// device stay.
DeviceInfo const& without_margin(DeviceInfo const& device);

}  // namespace flash
