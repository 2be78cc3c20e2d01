#include "bindings.h"
#include "core/tile_queue.h"

void bind_tile_queue(py::module_& m) {
  using flash::TileQueue;
  py::class_<TileQueue>(m, "TileQueue")
      .def(py::init([](uint32_t num_tiles, bool draws, bool draws_first) {
             static uint32_t counter = 0;  // `take` is the test's
             return TileQueue{num_tiles, draws ? &counter : nullptr, draws_first};
           }),
           py::kw_only(), py::arg("num_tiles"), py::arg("draws"), py::arg("draws_first") = false)
      .def(
          "first",
          [](TileQueue const& queue, uint32_t block, uint32_t num_blocks,
             py::function const& take) {
            return queue.first(block, num_blocks,
                               [&](uint32_t last) { return take(last).cast<uint32_t>(); });
          },
          py::kw_only(), py::arg("block"), py::arg("num_blocks"), py::arg("take"))
      .def(
          "next",
          [](TileQueue const& queue, uint32_t num_blocks, py::function const& take) {
            return queue.next(num_blocks,
                              [&](uint32_t last) { return take(last).cast<uint32_t>(); });
          },
          py::kw_only(), py::arg("num_blocks"), py::arg("take"));
}
