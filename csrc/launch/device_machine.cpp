#include "launch/device.h"

#include "plan/machines/nearest.h"

namespace flash {

plan::Machine machine_of(DeviceInfo const& device) {
  plan::Machine machine = plan::nearest_machine(device.l2_bytes);
  machine.sm = device.sm;
  machine.sm_count = device.sm_count;
  machine.l2_bytes = device.l2_bytes;
  constexpr int kMeasured = 90;
  constexpr float kReached = 0.8f;  // of the datasheet's rate, as on the GPUs that were measured
  if (device.sm != kMeasured && device.memory_rate > 0) {
    machine.reads *= kReached * device.memory_rate / machine.memory;
    machine.memory = kReached * device.memory_rate;
  }
  return machine;
}

}  // namespace flash
