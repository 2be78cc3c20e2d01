#include "launch/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace flash {
namespace {

// Jetson's: CUDA promises that code runs on later minor versions, but neither there nor from there.
constexpr int kOrin = 87;
constexpr int kOldest = 80;  // what the PTX is for

bool runs_on(int capability, int sm) {
  bool const later = capability / 10 == sm / 10 && capability < sm;
  return capability == sm || (later && capability != kOrin && sm != kOrin);
}

// The driver's variable, which makes it pass over machine code.
bool only_ptx() {
  char const* const text = std::getenv("CUDA_FORCE_PTX_JIT");
  return text && std::strcmp(text, "1") == 0;
}

}  // namespace

DeviceCode device_code(int sm) {
  CompiledCode const code = compiled_code();
  auto const serves = [sm](int capability) { return runs_on(capability, sm); };
  if (!only_ptx() && std::ranges::any_of(code.capabilities, serves)) {
    return DeviceCode::Native;
  }
  return code.ptx && sm >= kOldest ? DeviceCode::Ptx : DeviceCode::None;
}

}  // namespace flash
