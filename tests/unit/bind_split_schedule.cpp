#include "bindings.h"
#include "core/split_schedule.h"

void bind_split_schedule(py::module_& m) {
  using flash::SplitSchedule;
  py::class_<SplitSchedule>(m, "SplitSchedule")
      .def(py::init([](int batch, int tiles, int min_units, int max_splits, int wanted) {
             return SplitSchedule{batch, tiles, 64, min_units, max_splits, wanted};
           }),
           py::kw_only(), py::arg("batch"), py::arg("tiles"), py::arg("min_units") = 1,
           py::arg("max_splits") = 1 << 30, py::arg("wanted"))
      .def("num_columns", &flash::num_columns)
      .def("num_pieces", &flash::num_pieces)
      // (sequence, tile, split, splits, first_column, begin, end) of a thread block, or None
      .def(
          "piece",
          [](SplitSchedule const& s, std::vector<int> const& units,
             int64_t index) -> std::optional<std::tuple<int, int, int, int, int64_t, int, int>> {
            flash::Piece const p =
                flash::find_piece(s, index, flash::OneLane{}, [&](int b) { return units.at(b); });
            if (!p.valid) return std::nullopt;
            int const count = units.at(p.sequence);
            return std::make_tuple(p.sequence, p.tile, p.split, p.splits, p.first_column,
                                   p.begin_unit(count), p.end_unit(count));
          },
          py::arg("units"), py::arg("index"));
}
