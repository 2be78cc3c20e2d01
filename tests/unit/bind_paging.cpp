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

  // (entry of the block table, row inside the page)
  m.def(
      "page_slot",
      [](int page_size, int key) {
        auto const slot = flash::page_slot(FastDiv(page_size), key);
        return std::make_tuple(slot.index, slot.row);
      },
      py::arg("page_size"), py::arg("key"));

  m.def(
      "paged_offset",
      [](std::vector<int> const& block_table, int page_size, int64_t page_stride,
         int64_t row_stride, int key) -> std::optional<int64_t> {
        flash::PagedKeys const keys{block_table.data(), FastDiv(page_size), page_stride,
                                    row_stride};
        int64_t const offset = keys.offset(key);
        return offset == flash::PagedKeys::no_page ? std::nullopt : std::optional(offset);
      },
      py::kw_only(), py::arg("block_table"), py::arg("page_size"), py::arg("page_stride"),
      py::arg("row_stride"), py::arg("key"));
}
