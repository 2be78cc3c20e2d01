#include "bindings.h"
#include "core/score_mod.h"

void bind_score_mod(py::module_& m) {
  using flash::ScoreMod;
  py::class_<ScoreMod>(m, "ScoreMod")
      .def(py::init([](float softcap, float alibi_slope, int shift) {
             ScoreMod mod{};
             mod.softcap = softcap;
             mod.alibi_slope = alibi_slope;
             mod.shift = shift;
             return mod;
           }),
           py::kw_only(), py::arg("softcap") = 0.f, py::arg("alibi_slope") = 0.f,
           py::arg("shift") = 0)
      .def("cap", &ScoreMod::cap, py::arg("score"))
      .def("bias", &ScoreMod::bias, py::arg("row"), py::arg("key"));
}
