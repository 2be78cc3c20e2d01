#include "bindings.h"
#include "core/tile_columns.h"

void bind_tile_columns(py::module_& m) {
  m.attr("SHARERS") = flash::kSharers;
  m.attr("HOPPER_SHARERS") = flash::kHopperSharers;
  auto const few = [](flash::FewTiles const& f) { return std::pair(f.tiles, f.rounds); };
  m.attr("FEW_FORWARD_TILES") = few(flash::kFewForwardTiles);
  m.def(
      "columns_side_by_side",
      [](int64_t l2_bytes, int places, int sharers, int64_t count, int64_t bytes, int sharing,
         int tiles, bool equal_tiles, std::pair<int, int> few) {
        return flash::columns_side_by_side(l2_bytes, {places, sharers, {few.first, few.second}},
                                           {count, bytes, sharing, tiles, equal_tiles});
      },
      py::kw_only(), py::arg("l2_bytes"), py::arg("places"), py::arg("sharers"), py::arg("count"),
      py::arg("bytes"), py::arg("sharing"), py::arg("tiles"), py::arg("equal_tiles"),
      py::arg("few") = std::pair(0, 0));
}
