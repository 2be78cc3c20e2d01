#include "bindings.h"
#include "core/score_mod.h"

void bind_score_mod(py::module_& m) {
  using flash::ScoreMod;
  using flash::SmallCap;
  py::class_<ScoreMod>(m, "ScoreMod")
      .def(py::init([](float softmax_scale, float softcap, float alibi_slope, int shift) {
             ScoreMod mod{};
             mod.softmax_scale = softmax_scale;
             mod.softcap = softcap;
             mod.alibi_slope = alibi_slope;
             mod.shift = shift;
             return mod;
           }),
           py::kw_only(), py::arg("softmax_scale") = 1.f, py::arg("softcap") = 0.f,
           py::arg("alibi_slope") = 0.f, py::arg("shift") = 0)
      .def("cap", &ScoreMod::cap, py::arg("product"))
      .def("cap_by_case", &ScoreMod::cap_by_case, py::arg("product"))
      .def("usual_cap", &ScoreMod::usual_cap, py::arg("product"))
      .def("has_usual_cap", &ScoreMod::has_usual_cap)
      .def("scaled", &ScoreMod::scaled, py::arg("product"))
      .def("folds_scale", &ScoreMod::folds_scale)
      .def("exponent_scale", &ScoreMod::exponent_scale)
      .def("folded_slope", &ScoreMod::folded_slope)
      .def("bias", &ScoreMod::bias, py::arg("row"), py::arg("key"));
  py::class_<SmallCap>(m, "SmallCap")
      .def(py::init<ScoreMod const&>())
      .def("__call__", &SmallCap::operator(), py::arg("product"))
      .def_readonly("limit", &SmallCap::limit);
  m.def("softcap_in_range", &flash::softcap_in_range, py::arg("softcap"));
  m.def("tanh_absolute", &flash::tanh_absolute, py::arg("x"));
  m.def("tanh_relative", &flash::tanh_relative, py::arg("x"));
}
