// The machines that were measured.
#pragma once

#include <cstdlib>

#include "plan/machines/h100.h"
#include "plan/machines/h200.h"

namespace flash::plan {

inline constexpr Machine const* kMachines[] = {&kH200, &kH100};

// The machine whose L2 is nearest in size.
inline Machine const& nearest_machine(int64_t l2_bytes) {
  Machine const* nearest = kMachines[0];
  for (Machine const* m : kMachines) {
    bool const nearer = std::abs(m->l2_bytes - l2_bytes) < std::abs(nearest->l2_bytes - l2_bytes);
    nearest = nearer ? m : nearest;
  }
  return *nearest;
}

}  // namespace flash::plan
