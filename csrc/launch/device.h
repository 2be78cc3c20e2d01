// What the host knows about the GPU that it launches on: its properties (device.cpp), what runs
// there (device_code.cpp), and how fast it is (device_machine.cpp).
#pragma once

#include <span>

#include "launch/variant.h"
#include "plan/machine.h"
#include "plan/resident.h"

namespace flash {

inline constexpr int kMaxDevices = 256;

// The current device's properties, queried once per device.
DeviceInfo const& current_device();

inline plan::CtaSize cta_size(Variant const& v) { return {v.warps, v.smem_bytes, v.cluster}; }
inline plan::GpuSize gpu_size(DeviceInfo const& d) { return {d.sm_count, d.smem_per_block}; }

// The least shared memory of a CTA with which an SM holds at most so many CTAs.
inline int memory_for_at_most(int blocks, DeviceInfo const& device) {
  return device.smem_per_block / (blocks + 1) + 1;
}

// The row as plan/ knows it. resident: see plan/resident.h
inline plan::Kernel kernel_of(Variant const& v, int resident) {
  return {.sm = v.arch,
          .head_dim = v.head_dim,
          .head_dim_v = v.head_dim_v,
          .block_m = v.block_m,
          .block_n = v.block_n,
          .plain = v.is_plain(),
          .resident = resident,
          .second_block_n = v.second_block_n,
          .codes = v.cached_bits == 8,
          .cluster = v.cluster,
          .query_codes = std::string_view(v.dtype) == "e4m3"};
}

// What every kernel of the sm80 family was compiled to. Defined in the generated registry.
struct CompiledCode {
  std::span<int const> capabilities;  // of the machine code: 10 * major + minor
  bool ptx;
};
CompiledCode compiled_code();

enum class DeviceCode { Native, Ptx, None };

constexpr char const* to_string(DeviceCode code) {
  constexpr char const* names[] = {"machine code", "PTX", "none"};
  return names[static_cast<int>(code)];
}

// Whether a GPU runs machine code of this library, or what the driver compiles from its PTX. sm:
// its compute capability, 10 * major + minor.
DeviceCode device_code(int sm);

// The numbers of the measured machine that is most like the device, with the device's own where it
// reports them.
plan::Machine machine_of(DeviceInfo const& device);

}  // namespace flash
