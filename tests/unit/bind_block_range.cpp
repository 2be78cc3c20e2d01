#include "bindings.h"
#include "core/block_range.h"
#include "core/mask.h"
#include "core/row_range.h"

void bind_block_range(py::module_& m) {
  using flash::BlockRange;
  using flash::RowRange;
  using flash::SequenceMask;

  py::class_<BlockRange>(m, "BlockRange")
      .def_readonly("begin", &BlockRange::begin)
      .def_readonly("left", &BlockRange::left)
      .def_readonly("right", &BlockRange::right)
      .def_readonly("end", &BlockRange::end)
      .def("count", &BlockRange::count)
      .def("masked_count", &BlockRange::masked_count)
      .def("block_at", &BlockRange::block_at, py::arg("step"))
      .def(
          "part",
          [](BlockRange const& r, int number, int parts) {
            return r.part(number, flash::FastDiv(parts));
          },
          py::arg("number"), py::arg("parts"))
      .def("steps_right_of", &BlockRange::steps_right_of, py::kw_only(), py::arg("mask"),
           py::arg("row_end"), py::arg("block_n"))
      .def("masked", &BlockRange::masked, py::arg("block"))
      .def("after", &BlockRange::after, py::arg("block"));

  m.def("fragment_bits", &flash::fragment_bits, py::arg("begin"), py::arg("end"));

  py::class_<RowRange>(m, "RowRange")
      .def_readonly("begin", &RowRange::begin)
      .def_readonly("left", &RowRange::left)
      .def_readonly("right", &RowRange::right)
      .def_readonly("end", &RowRange::end)
      .def("count", &RowRange::count)
      .def("masked_count", &RowRange::masked_count)
      .def("masked", &RowRange::masked, py::arg("block"))
      .def("from_last", &RowRange::from_last, py::arg("step"))
      .def("block_at", &RowRange::block_at, py::arg("step"));

  py::class_<SequenceMask>(m, "SequenceMask")
      .def(py::init([](int left, int right, int seqlen_q, int seqlen_k) {
             return SequenceMask({left, right}, seqlen_q, seqlen_k);
           }),
           py::kw_only(), py::arg("left"), py::arg("right"), py::arg("seqlen_q"),
           py::arg("seqlen_k"))
      .def(
          "limits",
          [](SequenceMask const& mask, int row) {
            auto const limits = mask.limits(row);
            return std::make_tuple(limits.begin, limits.end);
          },
          py::arg("row"))
      .def("block_range", &flash::block_range, py::kw_only(), py::arg("row_begin"),
           py::arg("row_end"), py::arg("block_n"))
      .def(
          "dq_order",
          [](SequenceMask const& mask, int row_begin, int row_last, int key_begin, int block_n) {
            auto const turn = flash::dq_order(mask, row_begin, row_last, key_begin, block_n);
            return std::make_tuple(turn.first(), turn.before, turn.last);
          },
          py::kw_only(), py::arg("row_begin"), py::arg("row_last"), py::arg("key_begin"),
          py::arg("block_n"))
      .def("row_range", &flash::row_range, py::kw_only(), py::arg("seqlen_q"), py::arg("key_begin"),
           py::arg("block_n"), py::arg("block_m"));
}
