#include <array>

#include "bindings.h"
#include "core/dropout.h"

void bind_dropout(py::module_& m) {
  using flash::DropoutMask;
  using flash::TransposedDropout;

  m.def("dropout_threshold", &flash::dropout_threshold, py::arg("dropout_p"));
  m.def("dropout_rate", &flash::dropout_rate, py::arg("threshold"));
  m.def("dropout_bit", &flash::dropout_bit, py::arg("query"), py::arg("key"));
  m.def(
      "dropout_octet",
      [](int query, int key) {
        auto const octet = flash::dropout_octet(query, key);
        return std::make_tuple(octet.row, octet.col);
      },
      py::arg("query"), py::arg("key"));

  // The bits of a sequence that begins at (batch_head, query, key) in the whole.
  m.def(
      "part_keeps",
      [](std::array<int64_t, 2> rng_state, std::array<int64_t, 3> origin, int heads_q, int head,
         uint32_t threshold, int query, int key) {
        flash::DropoutOrigin const origins[2] = {{}, {origin[0], origin[1], origin[2]}};
        flash::Scores scores{};
        scores.rng_state = rng_state.data();
        scores.dropout_origins = origins;
        scores.dropout_threshold = threshold;
        return DropoutMask(scores, 1, heads_q, head).keep(query, key);
      },
      py::arg("rng_state"), py::arg("origin"), py::arg("heads_q"), py::arg("head"),
      py::arg("threshold"), py::arg("query"), py::arg("key"));

  py::class_<DropoutMask>(m, "DropoutMask")
      .def(py::init<int64_t, int64_t, int, int, int, uint32_t>(), py::kw_only(), py::arg("seed"),
           py::arg("offset"), py::arg("batch"), py::arg("heads_q"), py::arg("head"),
           py::arg("threshold"))
      .def("keep", &DropoutMask::keep, py::arg("query"), py::arg("key"))
      .def(
          "keep_bits",
          [](DropoutMask const& mask, uint32_t row, uint32_t col) {
            return mask.keep_bits({row, col});
          },
          py::arg("row"), py::arg("col"))
      .def(
          "keep_by_parity",
          [](DropoutMask const& mask, uint32_t row, uint32_t col, int first) {
            uint32_t kept[2] = {0, 0};
            mask.keep_by_parity({row, col}, first, kept);
            return std::array<uint32_t, 2>{kept[0], kept[1]};
          },
          py::arg("row"), py::arg("col"), py::arg("first"))
      .def(
          "drop",
          [](DropoutMask const& mask, uint32_t word, float lower, float upper) {
            mask.drop(word, lower, upper);
            return std::make_tuple(lower, upper);
          },
          py::arg("word"), py::arg("lower"), py::arg("upper"));

  py::class_<TransposedDropout>(m, "TransposedDropout")
      .def(py::init<int>(), py::arg("lane"))
      .def("partner", &TransposedDropout::partner)
      .def("query", &TransposedDropout::query)
      .def("key", &TransposedDropout::key)
      .def(
          "for_partner",
          [](TransposedDropout const& lane, std::array<uint32_t, 2> kept) {
            return lane.for_partner({kept[0], kept[1]});
          },
          py::arg("kept"))
      .def(
          "keep_bits",
          [](TransposedDropout const& lane, std::array<uint32_t, 2> kept, uint32_t from_partner) {
            return lane.keep_bits({kept[0], kept[1]}, from_partner);
          },
          py::arg("kept"), py::arg("from_partner"));
  m.def("halves_of_bits", &flash::halves_of_bits, py::arg("bits"), py::arg("first"));
  m.def("halves_of_bit", &flash::halves_of_bit, py::arg("lower"), py::arg("upper"), py::arg("bit"));
  m.def("permuted_bytes", &flash::permuted_bytes, py::arg("a"), py::arg("b"), py::arg("selector"));

  py::class_<flash::HalvesBelow>(m, "HalvesBelow")
      .def(py::init<uint32_t>(), py::arg("threshold"))
      .def_readonly_static("largest", &flash::HalvesBelow::kLargest)
      .def("__call__", &flash::HalvesBelow::operator(), py::arg("word"));
}
