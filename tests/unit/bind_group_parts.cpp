#include "bindings.h"
#include "core/group_parts.h"
#include "core/tile_cut.h"
#include "params/cut_tiles.h"
#include "params/head_group.h"

void bind_group_parts(py::module_& m) {
  m.def(
      "best_part_heads",
      [](int heads, int64_t tiles, double rows, double most, int places, int64_t most_parts) {
        return flash::best_part_heads({heads, tiles, rows, most}, places, most_parts);
      },
      py::kw_only(), py::arg("heads"), py::arg("tiles"), py::arg("rows"), py::arg("most"),
      py::arg("places"), py::arg("most_parts"));

  m.def(
      "best_row_parts",
      [](int heads, int64_t tiles, double rows, double most, int places, int block_m,
         int64_t most_slots) {
        return flash::best_row_parts({heads, tiles, rows, most}, {places, block_m, most_slots});
      },
      py::kw_only(), py::arg("heads"), py::arg("tiles"), py::arg("rows"), py::arg("most"),
      py::arg("places"), py::arg("block_m"), py::arg("most_slots"));

  // [(tile, slot, first step, end)] of all that is drawn, in its order, if a tile has so many steps
  m.def(
      "drawn_parts",
      [](int whole, int count, int parts, int steps) {
        auto const cut = flash::CutTiles::last(whole, count, parts);
        std::vector<std::tuple<int, int, int, int>> drawn;
        for (int i = 0; i < whole + cut.slots(); ++i) {
          int const slot = cut.slot_of(i);
          if (slot < 0) {
            drawn.emplace_back(i, slot, 0, steps);
          } else {
            int const part = cut.part_of(slot);
            drawn.emplace_back(cut.tile_of(slot), slot, cut.steps_before(part, steps),
                               cut.steps_before(part + 1, steps));
          }
        }
        return drawn;
      },
      py::kw_only(), py::arg("whole"), py::arg("count"), py::arg("parts"), py::arg("steps"));

  // [(KV head, first query head, query heads)] of all tiles of one block of keys
  m.def(
      "parts_of_groups",
      [](int heads_kv, int heads, int part_heads) {
        auto const group = flash::HeadGroup::in_parts(heads, part_heads);
        std::vector<std::tuple<int, int, int>> parts;
        for (int head = 0; head < heads_kv * group.parts; ++head) {
          flash::GroupPart const part = group.part(head);
          parts.emplace_back(part.head_kv, part.head_begin, part.heads);
        }
        return parts;
      },
      py::kw_only(), py::arg("heads_kv"), py::arg("heads"), py::arg("part_heads"));
}
