#include "launch/sm_margin.h"

#include <algorithm>

namespace flash {
namespace {

thread_local int64_t margin = 0;

}  // namespace

int sms_left(int sms, int64_t margin) {
  constexpr int kFewest = 2;
  return static_cast<int>(std::max<int64_t>(sms - margin, std::min(sms, kFewest)));
}

SmMargin::SmMargin(int64_t sms) : before_(margin) { margin = sms; }
SmMargin::~SmMargin() { margin = before_; }

DeviceInfo const& without_margin(DeviceInfo const& device) {
  if (margin == 0) {
    return device;
  }
  thread_local DeviceInfo smaller;
  smaller = device;
  smaller.sm_count = sms_left(device.sm_count, margin);
  return smaller;
}

}  // namespace flash
