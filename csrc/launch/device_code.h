// Whether a GPU runs machine code of this library, or what the driver compiles from its PTX.
#pragma once

#include <span>

namespace flash {

// What every kernel of the sm80 family was compiled to. Defined in the generated registry.
struct CompiledCode {
  std::span<int const> capabilities;  // of the machine code: 10 * major + minor
  bool ptx;
};
CompiledCode compiled_code();

enum class DeviceCode { Machine, Ptx, None };

constexpr char const* to_string(DeviceCode code) {
  constexpr char const* names[] = {"machine code", "PTX", "none"};
  return names[static_cast<int>(code)];
}

// sm: the GPU's compute capability, 10 * major + minor.
DeviceCode device_code(int sm);

}  // namespace flash
