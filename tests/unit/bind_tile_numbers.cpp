#include "bindings.h"
#include "core/tile_numbers.h"

namespace {

using Tile = std::tuple<int, int, int>;  // m_block, head, batch

// Every num_blocks-th tile from number `block` on, up to `limit`; surplus ones are left out.
template <class Tiles, class Find>
std::vector<Tile> walk(Tiles const& tiles, int64_t block, int64_t num_blocks, int limit,
                       Find find) {
  std::vector<Tile> done;
  int64_t index = block;
  for (; index < tiles.num_tiles() && int(done.size()) < limit; index += num_blocks) {
    flash::WorkTile const tile = find(index);
    if (tile.valid) done.emplace_back(tile.m_block, tile.head, tile.batch);
  }
  if (index >= tiles.num_tiles() && find(index).valid) {
    throw std::logic_error("a tile past the end");
  }
  return done;
}

struct Rows {
  std::vector<int> const* starts;
  int start(int sequence) const { return starts->at(sequence); }  // throws when out of range
  int wanted(int /*sequence*/, int length) const { return length; }
};

}  // namespace

void bind_tile_numbers(py::module_& m) {
  m.def("even_group", &flash::even_group, py::arg("group"), py::arg("num_columns"));

  using flash::DenseTiles;
  py::class_<DenseTiles>(m, "DenseTiles")
      .def(py::init([](int m_blocks, int heads, int batch, int group, bool longest_first) {
             return DenseTiles{m_blocks, heads, batch, {group, longest_first}};
           }),
           py::kw_only(), py::arg("m_blocks"), py::arg("heads"), py::arg("batch"),
           py::arg("group") = 1, py::arg("longest_first") = false)
      .def("num_tiles", &DenseTiles::num_tiles)
      .def(
          "tiles",
          [](DenseTiles const& s, int64_t block, int64_t num_blocks, int limit) {
            return walk(s, block, num_blocks, limit,
                        [&](int64_t index) { return flash::find_tile(s, index); });
          },
          py::arg("block"), py::arg("num_blocks"), py::arg("limit") = 1 << 20);

  using flash::VarlenTiles;
  py::class_<VarlenTiles>(m, "VarlenTiles")
      .def(py::init([](int64_t total_q, int block_m, int heads, int batch, int group,
                       bool longest_first) {
             return VarlenTiles::of(total_q, block_m, heads, batch, {group, longest_first});
           }),
           py::kw_only(), py::arg("total_q"), py::arg("block_m"), py::arg("heads"),
           py::arg("batch"), py::arg("group") = 1, py::arg("longest_first") = false)
      .def("num_tiles", &VarlenTiles::num_tiles)
      .def(
          "tiles",
          [](VarlenTiles const& s, std::vector<int> const& starts, int64_t block,
             int64_t num_blocks) {
            return walk(s, block, num_blocks, 1 << 20,
                        [&](int64_t index) { return flash::find_tile(s, Rows{&starts}, index); });
          },
          py::arg("starts"), py::arg("block"), py::arg("num_blocks"));
}
