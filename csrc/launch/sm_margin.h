// SMs that a call leaves to others, such as a collective that runs beside it.
#pragma once

#include <cstdint>

#include "launch/variant.h"

namespace flash {

// SMs that a call takes if it leaves `margin` of a GPU's `sms` to others: at least two, or the one
// that there is.
int sms_left(int sms, int64_t margin);

// While this lives, the thread's calls are planned and launched as if the GPU had so many SMs
// fewer. Launches of one CTA a tile may still run on any SM.
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
