#include "bindings.h"
#include "core/tile_grid.h"

void bind_tile_grid(py::module_& m) {
  // All tiles of a launch: (m_block, head, batch), or None for a surplus one. of_keys: the same
  // lengths as keys. by_first_blocks: the CTA that has a tile goes on with those below. few_q:
  // another kernel has sequences of no more queries.
  m.def(
      "tile_grid",
      [](int batch, int seqlen_q, int64_t total_q, std::optional<std::vector<int>> const& cu_q,
         int heads, int block_m, int group, bool longest_first, bool of_keys, bool by_first_blocks,
         int few_q) {
        int const* const cu = cu_q ? cu_q->data() : nullptr;
        flash::TileOrder const order{group, longest_first};
        flash::Seqlens seqlens{};
        seqlens.batch = batch;
        (of_keys ? seqlens.seqlen_k : seqlens.seqlen_q) = seqlen_q;
        (of_keys ? seqlens.total_k : seqlens.total_q) = total_q;
        (of_keys ? seqlens.cu_k : seqlens.cu_q) = cu;
        seqlens.few_q = few_q;
        auto const grid = by_first_blocks ? flash::make_first_blocks_grid(seqlens, heads, block_m)
                          : of_keys ? flash::make_key_tile_grid(seqlens, heads, block_m, order)
                                    : flash::make_tile_grid(seqlens, heads, block_m, order);
        std::vector<std::optional<std::tuple<int, int, int>>> tiles;
        for (int64_t index = 0; index < grid.num_tiles(); ++index) {
          flash::WorkTile tile =
              of_keys ? grid.tile(cu, batch, total_q, index) : grid.tile(seqlens, index);
          tiles.emplace_back();
          for (; tile.valid; tile = grid.below(seqlens, tile)) {
            if (tiles.back()) tiles.emplace_back();
            tiles.back() = {tile.m_block, tile.head, tile.batch};
          }
        }
        return tiles;
      },
      py::kw_only(), py::arg("batch"), py::arg("seqlen_q") = 0, py::arg("total_q") = 0,
      py::arg("cu_q") = py::none(), py::arg("heads"), py::arg("block_m"), py::arg("group"),
      py::arg("longest_first"), py::arg("of_keys") = false, py::arg("by_first_blocks") = false,
      py::arg("few_q") = 0);
}
