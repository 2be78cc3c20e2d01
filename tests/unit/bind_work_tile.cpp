#include "bindings.h"
#include "core/last_rows.h"
#include "core/work_tile.h"

void bind_work_tile(py::module_& m) {
  m.def("num_m_blocks", &flash::num_m_blocks, py::arg("seqlen_q"), py::arg("block_m"));

  // (m_block, column)
  m.def(
      "tile_at",
      [](int group, bool longest_first, int64_t index, int m_blocks, int64_t columns) {
        auto const tile = flash::tile_at({group, longest_first}, index, m_blocks, columns);
        return std::make_tuple(tile.m_block, tile.column);
      },
      py::kw_only(), py::arg("group"), py::arg("longest_first"), py::arg("index"),
      py::arg("m_blocks"), py::arg("columns"));

  using Tiles = std::pair<int64_t, double>;
  m.def("time_of_all", [](Tiles whole, Tiles parts, int takers, double start) {
    return flash::time_of_all({whole.first, whole.second}, {parts.first, parts.second}, takers,
                              start);
  });

  // (rows, parts)
  m.def(
      "best_last_rows",
      [](int rows, int block_m, int64_t columns, int part_block_m, int64_t part_columns, int takers,
         double tile_time, int part_steps, double step_time, double part_time, double row_of_part,
         int64_t most_rows) {
        auto const last = flash::best_last_rows({rows, block_m, columns, part_block_m, part_columns,
                                                 takers, tile_time, part_steps, step_time,
                                                 part_time, row_of_part, most_rows});
        return std::make_pair(last.rows, last.parts);
      },
      py::kw_only(), py::arg("rows"), py::arg("block_m"), py::arg("columns"),
      py::arg("part_block_m"), py::arg("part_columns"), py::arg("takers"), py::arg("tile_time"),
      py::arg("part_steps"), py::arg("step_time"), py::arg("part_time"), py::arg("row_of_part"),
      py::arg("most_rows"));
}
