#include "bindings.h"
#include "core/tile_columns.h"

void bind_tile_columns(py::module_& m) {
  m.attr("SHARERS") = flash::kSharers;
  m.attr("HOPPER_SHARERS") = flash::kHopperSharers;
  m.attr("FEW_TILES_ROUNDS") = flash::kFewTilesRounds;
  m.def(
      "columns_side_by_side",
      [](int64_t l2_bytes, int places, int sharers, int64_t count, int64_t bytes, int sharing,
         int tiles, bool equal_tiles, int few_tiles_rounds) {
        return flash::columns_side_by_side(l2_bytes, {places, sharers, few_tiles_rounds},
                                           {count, bytes, sharing, tiles, equal_tiles});
      },
      py::kw_only(), py::arg("l2_bytes"), py::arg("places"), py::arg("sharers"), py::arg("count"),
      py::arg("bytes"), py::arg("sharing"), py::arg("tiles"), py::arg("equal_tiles"),
      py::arg("few_tiles_rounds") = flash::kRounds);
}
