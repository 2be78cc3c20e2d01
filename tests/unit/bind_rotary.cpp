#include "bindings.h"
#include "core/rotary.h"

void bind_rotary(py::module_& m) {
  // (pair, partner, sign)
  m.def(
      "rotary_term",
      [](bool interleaved, int rotary_dim, int dim) {
        using flash::RotaryLayout;
        auto const layout = interleaved ? RotaryLayout::Interleaved : RotaryLayout::HalfSplit;
        auto const term = flash::rotary_term(layout, rotary_dim, dim);
        return std::make_tuple(term.pair, term.partner, term.sign);
      },
      py::kw_only(), py::arg("interleaved"), py::arg("rotary_dim"), py::arg("dim"));

  m.def(
      "rotate",
      [](float sign, float x, float partner, float cos, float sin) {
        return flash::rotate({0, 0, sign}, x, partner, cos, sin);
      },
      py::kw_only(), py::arg("sign"), py::arg("x"), py::arg("partner"), py::arg("cos"),
      py::arg("sin"));

  m.def(
      "turn_pair",
      [](float first, float second, float cos, float sin) {
        flash::Pair const rotated = flash::rotate_pair({first, second}, cos, sin);
        return std::make_pair(rotated.first, rotated.second);
      },
      py::kw_only(), py::arg("first"), py::arg("second"), py::arg("cos"), py::arg("sin"));
}
