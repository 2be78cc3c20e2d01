#include "bindings.h"
#include "core/work_tile.h"

void bind_work_tile(py::module_& m) {
  m.def("num_blocks", &flash::num_blocks, py::arg("rows"), py::arg("block"));

  // (m_block, strip)
  m.def(
      "tile_at",
      [](int group, bool longest_first, int64_t index, int m_blocks, int64_t strips) {
        auto const tile = flash::tile_at({group, longest_first}, index, m_blocks, strips);
        return std::make_tuple(tile.m_block, tile.strip);
      },
      py::kw_only(), py::arg("group"), py::arg("longest_first"), py::arg("index"),
      py::arg("m_blocks"), py::arg("strips"));
}
