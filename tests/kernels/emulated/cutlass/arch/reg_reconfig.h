// Stands in for CUTLASS's header.
#pragma once

#include "hopper/registers.h"

namespace cutlass::arch {

template <uint32_t kRegisters>
void warpgroup_reg_alloc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simt::register_file().take(kRegisters);
}

template <uint32_t kRegisters>
void warpgroup_reg_dealloc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simt::register_file().give_back(kRegisters);
}

}  // namespace cutlass::arch
