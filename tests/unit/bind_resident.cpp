#include "bindings.h"
#include "plan/resident.h"

using namespace flash::plan;

// All take (warps, bytes of shared memory, CTAs of a cluster) of a CTA, and (SMs, the most bytes of
// a CTA) of a GPU.
void bind_resident(py::module_& m) {
  using Cta = std::tuple<int, int, int>;
  using Gpu = std::tuple<int, int>;
  auto const cta = [](Cta const& c) { return std::make_from_tuple<CtaSize>(c); };
  auto const gpu = [](Gpu const& g) { return std::make_from_tuple<GpuSize>(g); };
  m.def("resident_backward",
        [=](Cta const& c, Gpu const& g) { return resident_backward(cta(c), gpu(g)); });
  m.def("resident_forward", [=](bool hopper, Cta const& c, Gpu const& g) {
    return resident_forward(hopper, cta(c), gpu(g));
  });
  m.def("resident_decode",
        [=](Cta const& c, Gpu const& g) { return resident_decode(cta(c), gpu(g)); });
}
