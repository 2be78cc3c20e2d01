#include "launch/machine.h"

#include <cmath>

#include "plan/machines/h100.h"
#include "plan/machines/h200.h"

namespace flash {

plan::Machine machine_of(DeviceInfo const& device) {
  plan::Machine const* nearest = nullptr;
  for (plan::Machine const* m : {&plan::kH200, &plan::kH100}) {
    auto const apart = [&](plan::Machine const& other) {
      return std::abs(double(other.l2_bytes - device.l2_bytes));
    };
    nearest = !nearest || apart(*m) < apart(*nearest) ? m : nearest;
  }
  plan::Machine machine = *nearest;
  machine.sm = device.sm;
  machine.sm_count = device.sm_count;
  machine.l2_bytes = device.l2_bytes;
  machine.smem_per_block = device.smem_per_block;
  constexpr int kMeasured = 90;
  constexpr float kReached = 0.8f;  // of the datasheet's rate, as on the GPUs that were measured
  if (device.sm != kMeasured && device.memory_rate > 0) {
    machine.reads *= kReached * device.memory_rate / machine.memory;
    machine.memory = kReached * device.memory_rate;
  }
  return machine;
}

}  // namespace flash
