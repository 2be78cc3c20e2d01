#include "bindings.h"
#include "core/block_range.h"
#include "core/mask.h"
#include "core/row_range.h"

namespace {

// Blocks from begin to end, of which those before left and from right on have masked entries.
template <class Range>
py::class_<Range> bind_range(py::module_& m, char const* name) {
  return py::class_<Range>(m, name)
      .def_readonly("begin", &Range::begin)
      .def_readonly("left", &Range::left)
      .def_readonly("right", &Range::right)
      .def_readonly("end", &Range::end)
      .def("count", &Range::count)
      .def("masked_count", &Range::masked_count)
      .def("masked", &Range::masked, py::arg("block"))
      .def("block_at", &Range::block_at, py::arg("step"));
}

}  // namespace

void bind_block_range(py::module_& m) {
  using flash::BlockRange;
  using flash::RowRange;
  using flash::SequenceMask;

  bind_range<BlockRange>(m, "BlockRange")
      .def(
          "split",
          [](BlockRange const& r, int number, int splits) {
            return r.split(number, flash::FastDiv(splits));
          },
          py::arg("number"), py::arg("splits"))
      .def("steps_right_of", &BlockRange::steps_right_of, py::kw_only(), py::arg("mask"),
           py::arg("row_end"), py::arg("block_n"))
      .def("after", &BlockRange::after, py::arg("block"));

  m.def("fragment_bits", &flash::fragment_bits, py::arg("begin"), py::arg("end"));

  bind_range<RowRange>(m, "RowRange").def("from_last", &RowRange::from_last, py::arg("step"));

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
            auto const order = flash::dq_order(mask, row_begin, row_last, key_begin, block_n);
            return std::make_tuple(order.first(), order.before, order.last);
          },
          py::kw_only(), py::arg("row_begin"), py::arg("row_last"), py::arg("key_begin"),
          py::arg("block_n"))
      .def("row_range", &flash::row_range, py::kw_only(), py::arg("seqlen_q"), py::arg("key_begin"),
           py::arg("block_n"), py::arg("block_m"));
}
