#include "bindings.h"
#include "core/tile_scheduler.h"

namespace {

using Tile = std::tuple<int, int, int>;  // m_block, head, batch

// What one thread block does, up to `limit` tiles; surplus ones are left out.
template <class Scheduler>
std::vector<Tile> walk(Scheduler tiles, int limit) {
  std::vector<Tile> done;
  for (; tiles.valid() && int(done.size()) < limit; tiles.next()) {
    flash::WorkTile const tile = tiles.coord();
    if (tile.valid) done.emplace_back(tile.m_block, tile.head, tile.batch);
  }
  if (!tiles.valid() && tiles.coord().valid) throw std::logic_error("a tile past the end");
  return done;
}

struct Rows {
  std::vector<int> const* starts;
  int start(int sequence) const { return starts->at(sequence); }  // throws when out of range
  int wanted(int /*sequence*/, int length) const { return length; }
};

}  // namespace

void bind_scheduler(py::module_& m) {
  m.def("even_group", &flash::even_group, py::arg("group"), py::arg("num_columns"));

  using flash::DenseSchedule;
  py::class_<DenseSchedule>(m, "DenseSchedule")
      .def(py::init([](int m_blocks, int heads, int batch, int group, bool longest_first) {
             return DenseSchedule{m_blocks, heads, batch, {group, longest_first}};
           }),
           py::kw_only(), py::arg("m_blocks"), py::arg("heads"), py::arg("batch"),
           py::arg("group") = 1, py::arg("longest_first") = false)
      .def("num_tiles", &DenseSchedule::num_tiles)
      .def(
          "tiles",
          [](DenseSchedule const& s, int64_t block, int64_t num_blocks, int limit) {
            return walk(flash::DenseScheduler(s, block, num_blocks), limit);
          },
          py::arg("block"), py::arg("num_blocks"), py::arg("limit") = 1 << 20);

  using flash::VarlenSchedule;
  py::class_<VarlenSchedule>(m, "VarlenSchedule")
      .def(py::init([](int64_t total_q, int block_m, int heads, int batch, int group,
                       bool longest_first) {
             return VarlenSchedule::of(total_q, block_m, heads, batch, {group, longest_first});
           }),
           py::kw_only(), py::arg("total_q"), py::arg("block_m"), py::arg("heads"),
           py::arg("batch"), py::arg("group") = 1, py::arg("longest_first") = false)
      .def("num_tiles", &VarlenSchedule::num_tiles)
      .def(
          "tiles",
          [](VarlenSchedule const& s, std::vector<int> const& starts, int64_t block,
             int64_t num_blocks) {
            return walk(flash::VarlenScheduler(s, Rows{&starts}, block, num_blocks), 1 << 20);
          },
          py::arg("starts"), py::arg("block"), py::arg("num_blocks"));
}
