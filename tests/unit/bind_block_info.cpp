#include "bindings.h"
#include "core/block_info.h"

namespace {

using OptionalInts = std::optional<std::vector<int>>;

int const* data(OptionalInts const& values) { return values ? values->data() : nullptr; }

}  // namespace

void bind_block_info(py::module_& m) {
  using flash::BlockInfo;
  py::class_<BlockInfo>(m, "BlockInfo")
      .def_readonly("seqlen_q", &BlockInfo::seqlen_q)
      .def_readonly("seqlen_k", &BlockInfo::seqlen_k)
      .def_readonly("row_q", &BlockInfo::row_q)
      .def_readonly("row_k", &BlockInfo::row_k);

  m.def(
      "block_info",
      [](int sequence, int batch, int seqlen_q, int seqlen_k, int64_t total_q,
         OptionalInts const& cu_q, OptionalInts const& cu_k, OptionalInts const& used_k,
         OptionalInts const& leftpad_k) {
        return BlockInfo({batch, seqlen_q, seqlen_k, total_q, data(cu_q), data(cu_k), data(used_k),
                          data(leftpad_k), 0},
                         sequence);
      },
      py::kw_only(), py::arg("sequence"), py::arg("batch"), py::arg("seqlen_q") = 0,
      py::arg("seqlen_k") = 0, py::arg("total_q") = 0, py::arg("cu_q") = py::none(),
      py::arg("cu_k") = py::none(), py::arg("used_k") = py::none(),
      py::arg("leftpad_k") = py::none());
}
