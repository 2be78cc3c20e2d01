#include "bindings.h"
#include "core/group_parts.h"
#include "params/head_group.h"

void bind_group_parts(py::module_& m) {
  m.def(
      "best_part_heads",
      [](int heads, int64_t tiles, double rows, double most, int places, int64_t most_parts) {
        return flash::best_part_heads({heads, tiles, rows, most}, places, most_parts);
      },
      py::kw_only(), py::arg("heads"), py::arg("tiles"), py::arg("rows"), py::arg("most"),
      py::arg("places"), py::arg("most_parts"));

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
