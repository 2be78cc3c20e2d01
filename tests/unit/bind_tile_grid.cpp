#include "bindings.h"
#include "core/tile_grid.h"

void bind_tile_grid(py::module_& m) {
  // All tiles of a launch: (m_block, head, batch), or None for a surplus one.
  m.def(
      "tile_grid",
      [](int batch, int seqlen_q, int64_t total_q, std::optional<std::vector<int>> const& cu_q,
         int heads, int block_m, int group, bool longest_first) {
        flash::Seqlens const seqlens{
            batch,   seqlen_q, 0,       total_q, cu_q ? cu_q->data() : nullptr,
            nullptr, nullptr,  nullptr, 0};
        auto const grid = flash::make_tile_grid(seqlens, heads, block_m, {group, longest_first});
        std::vector<std::optional<std::tuple<int, int, int>>> tiles;
        for (int64_t index = 0; index < grid.num_tiles(); ++index) {
          flash::WorkTile const tile = grid.tile(seqlens, index);
          tiles.emplace_back();
          if (tile.valid) tiles.back() = {tile.m_block, tile.head, tile.batch};
        }
        return tiles;
      },
      py::kw_only(), py::arg("batch"), py::arg("seqlen_q") = 0, py::arg("total_q") = 0,
      py::arg("cu_q") = py::none(), py::arg("heads"), py::arg("block_m"), py::arg("group"),
      py::arg("longest_first"));
}
