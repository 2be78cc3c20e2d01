#include "bindings.h"
#include "core/philox.h"

namespace {

template <int kRounds, bool kWide>
std::array<uint32_t, 4> philox(std::array<uint32_t, 2> key, std::array<uint32_t, 4> counter) {
  auto const [word] = flash::philox<kRounds, kWide>(
      {{key[0], key[1]}}, {{counter[0], counter[1], counter[2], counter[3]}});
  return {word[0], word[1], word[2], word[3]};
}

}  // namespace

void bind_philox(py::module_& m) {
  m.def("philox_7", &philox<7, false>, py::arg("key"), py::arg("counter"));
  m.def("philox_7_wide", &philox<7, true>, py::arg("key"), py::arg("counter"));
  m.def("philox_10", &philox<10, false>, py::arg("key"), py::arg("counter"));
}
