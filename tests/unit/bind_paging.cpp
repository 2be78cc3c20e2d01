#include "bindings.h"
#include "core/paging.h"

void bind_paging(py::module_& m) {
  using flash::FastDiv;
  py::class_<FastDiv>(m, "FastDiv")
      .def(py::init<int>(), py::arg("divisor"))
      .def(
          "divmod",
          [](FastDiv const& divide, int n) {
            int const quotient = divide.quotient(n);
            return std::make_tuple(quotient, divide.remainder(n, quotient));
          },
          py::arg("n"));

  // (page, row inside it) of a position, or None if there is no such page
  m.def(
      "page_slot",
      [](std::optional<std::vector<int>> const& block_table, int page_size, int pages, int batch_k,
         int position) -> std::optional<std::tuple<int, int>> {
        flash::Pages p{};
        if (block_table) {
          p = {block_table->data(), 0, int(block_table->size()), FastDiv(page_size), pages};
        }
        flash::Seqlens seqlens{};
        seqlens.batch = 1;
        seqlens.batch_k = &batch_k;
        seqlens.batches_k = pages;
        flash::KeyPages const keys(p, flash::BlockInfo(seqlens, 0), 0);
        flash::PageSlot const slot = keys.slot(position);
        return keys.exists(slot) ? std::optional(std::make_tuple(slot.page, slot.row))
                                 : std::nullopt;
      },
      py::kw_only(), py::arg("block_table") = py::none(), py::arg("page_size") = 1,
      py::arg("pages"), py::arg("batch_k") = 0, py::arg("position"));
}
