#include "bindings.h"
#include "core/score_mod.h"

void bind_score_mod(py::module_& m) {
  using flash::ScoreMod;
  py::class_<ScoreMod>(m, "ScoreMod")
      .def(py::init([](float softmax_scale, float softcap, float alibi_slope, int shift) {
             ScoreMod mod{};
             mod.softmax_scale = softmax_scale;
             mod.softcap = softcap;
             mod.alibi_slope = alibi_slope;
             mod.shift = shift;
             return mod;
           }),
           py::kw_only(), py::arg("softmax_scale") = 1.f, py::arg("softcap") = 0.f, py::arg("alibi_slope") = 0.f,
           py::arg("shift") = 0)
      .def("cap", &ScoreMod::cap, py::arg("product"))
      .def("scaled", &ScoreMod::scaled, py::arg("product"))
      .def("scales_only", &ScoreMod::scales_only)
      .def("exponent_scale", &ScoreMod::exponent_scale)
      .def("bias", py::overload_cast<int, int>(&ScoreMod::bias, py::const_), py::arg("row"),
           py::arg("key"));
}
