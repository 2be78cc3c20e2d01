#include "launch/sm_margin.h"

#include <algorithm>

namespace flash {
namespace {

// As many stay, whatever a call leaves to others.
constexpr int kFewestSms = 2;

thread_local int64_t margin = 0;

}  // namespace

SmMargin::SmMargin(int64_t sms) : before_(margin) { margin = sms; }
SmMargin::~SmMargin() { margin = before_; }

DeviceInfo const& without_margin(DeviceInfo const& device) {
  if (margin == 0) {
    return device;
  }
  thread_local DeviceInfo smaller;
  smaller = device;
  smaller.sm_count = static_cast<int>(
      std::max<int64_t>(device.sm_count - margin, std::min(device.sm_count, kFewestSms)));
  return smaller;
}

}  // namespace flash
