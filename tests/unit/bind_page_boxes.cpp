#include "bindings.h"
#include "core/page_boxes.h"

void bind_page_boxes(py::module_& m) {
  using flash::PageBox;
  m.def("suit_page_boxes", &PageBox::suit, py::arg("page_size"));

  // (first, size, keys) of each lane
  m.def(
      "page_boxes",
      [](int position, int left, int tile_keys, int page_size) {
        std::vector<std::tuple<int, int, int>> boxes;
        for (int lane = 0; lane < PageBox::kLanes; ++lane) {
          PageBox const box(lane, position, left, tile_keys, flash::FastDiv(page_size));
          boxes.emplace_back(box.first, box.size, box.keys);
        }
        return boxes;
      },
      py::kw_only(), py::arg("position"), py::arg("left"), py::arg("tile_keys"),
      py::arg("page_size"));
}
