#include "bindings.h"
#include "core/merge_rounds.h"
#include "core/piece_schedule.h"

namespace {

// One thread that searches alone.
struct OneLane {
  static constexpr int kCount = 1;
  int index() const { return 0; }
  int64_t sum(int64_t x) const { return x; }
  int running_sum(int x) const { return x; }
  int first(bool condition) const { return condition ? 0 : kCount; }
  int of(int /*lane*/, int x) const { return x; }
};

}  // namespace

void bind_piece_schedule(py::module_& m) {
  using flash::PieceSchedule;
  py::class_<PieceSchedule>(m, "PieceSchedule")
      .def(py::init([](int batch, int tiles, bool equal, int min_units, int max_pieces, int slices,
                       std::optional<int> extra, std::optional<int> all_row_blocks) {
             PieceSchedule s{};
             s.batch = batch;
             s.tiles = flash::FastDiv(tiles);
             s.equal = equal;
             s.min_units = min_units;
             s.max_pieces = max_pieces;
             s.slices = slices;
             s.extra = extra.value_or(slices);
             s.varlen = all_row_blocks.has_value();
             s.all_row_blocks = all_row_blocks.value_or(batch);
             return s;
           }),
           py::kw_only(), py::arg("batch"), py::arg("tiles"), py::arg("equal") = false,
           py::arg("min_units") = 1, py::arg("max_pieces") = 1 << 30, py::arg("slices"),
           py::arg("extra") = py::none(), py::arg("all_row_blocks") = py::none())
      .def("num_slices", &flash::num_slices)
      .def("num_pieces", &flash::num_pieces)
      // (sequence, tile, number, count, first, step, begin, end) of a thread block, or None.
      // row_blocks: of each sequence, if not one, and of those that the batch has not.
      .def(
          "piece",
          [](PieceSchedule const& s, std::vector<int> const& units, int index,
             std::optional<std::vector<int>> const& row_blocks)
              -> std::optional<std::tuple<int, int, int, int, int, int, int, int>> {
            auto const size = [&](int b) {
              return flash::SequenceSize{b < s.batch ? units.at(b) : 0,
                                         row_blocks ? row_blocks->at(b) : 1};
            };
            flash::Piece const p = flash::find_piece(s, index, OneLane{}, size);
            if (!p.valid) return std::nullopt;
            flash::UnitRange const range = p.range(p.sequence < s.batch ? units.at(p.sequence) : 0);
            return std::make_tuple(p.sequence, p.tile, p.number, p.count, p.first, p.step,
                                   range.begin, range.end);
          },
          py::arg("units"), py::arg("index"), py::arg("row_blocks") = py::none());
  m.def(
      "even_share",
      [](int begin, int end, int part, int parts) {
        flash::UnitRange const range = flash::even_share({begin, end}, part, parts);
        return std::make_pair(range.begin, range.end);
      },
      py::arg("begin"), py::arg("end"), py::arg("part"), py::arg("parts"));

  // [(first, stride, count, counter, last)] of the sets of a piece, round after round
  m.def(
      "merge_rounds",
      [](int pieces, int piece, int fan_in) {
        std::vector<std::tuple<int, int, int, int, bool>> sets;
        for (flash::MergeRounds r(pieces, piece, fan_in); r.valid(); r.next()) {
          flash::MergeSet const g = r.set();
          sets.emplace_back(g.first, g.stride, g.count, g.counter, r.last());
        }
        return sets;
      },
      py::arg("pieces"), py::arg("piece"), py::arg("fan_in"));
}
