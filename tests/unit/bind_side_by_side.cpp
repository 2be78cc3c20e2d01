#include "bindings.h"
#include "core/forward_beside_decode.h"

void bind_side_by_side(py::module_& m) {
  m.def(
      "forward_blocks",
      [](float tile_keys, float tiles, float decode_keys, int rows, int most) {
        return flash::forward_blocks({tile_keys, tiles, decode_keys}, rows, most);
      },
      py::kw_only(), py::arg("tile_keys"), py::arg("tiles"), py::arg("decode_keys"),
      py::arg("rows"), py::arg("most"));
}
