#include "bindings.h"
#include "core/block_info.h"
#include "core/work_tile.h"

namespace {

using OptionalInts = std::optional<std::vector<int>>;

int const* data(OptionalInts const& values) { return values ? values->data() : nullptr; }

}  // namespace

void bind_block_info(py::module_& m) {
  using flash::BlockInfo;
  py::class_<BlockInfo>(m, "BlockInfo")
      .def_readonly("seqlen_q", &BlockInfo::seqlen_q)
      .def_readonly("seqlen_k", &BlockInfo::seqlen_k)
      .def_readonly("slots_k", &BlockInfo::slots_k)
      .def_readonly("row_q", &BlockInfo::row_q)
      .def_readonly("row_k", &BlockInfo::row_k)
      .def_readonly("leftpad", &BlockInfo::leftpad)
      .def_readonly("batch_k", &BlockInfo::batch_k);

  m.def(
      "block_info",
      [](int sequence, int batch, int seqlen_q, int seqlen_k, int64_t total_q,
         OptionalInts const& cu_q, OptionalInts const& cu_k, OptionalInts const& used_k,
         OptionalInts const& leftpad_k, int new_k, OptionalInts const& batch_k, int batches_k,
         int64_t total_k, bool in_pages) {
        flash::Seqlens s{};
        s.batch = batch;
        s.seqlen_q = seqlen_q;
        s.seqlen_k = seqlen_k;
        s.total_q = total_q;
        s.cu_q = data(cu_q);
        s.cu_k = data(cu_k);
        s.used_k = data(used_k);
        s.leftpad_k = data(leftpad_k);
        s.new_k = new_k;
        s.batch_k = data(batch_k);
        s.batches_k = batches_k;
        s.total_k = total_k;
        s.in_pages = in_pages;
        return BlockInfo(s, sequence);
      },
      py::kw_only(), py::arg("sequence"), py::arg("batch"), py::arg("seqlen_q") = 0,
      py::arg("seqlen_k") = 0, py::arg("total_q") = 0, py::arg("cu_q") = py::none(),
      py::arg("cu_k") = py::none(), py::arg("used_k") = py::none(),
      py::arg("leftpad_k") = py::none(), py::arg("new_k") = 0, py::arg("batch_k") = py::none(),
      py::arg("batches_k") = 0, py::arg("total_k") = 0, py::arg("in_pages") = false);

  m.def(
      "sequence_of",
      [](int row, int total, std::vector<int> const& cu) {
        return flash::VarlenRows{cu.data(), static_cast<int>(cu.size()) - 1, total}.sequence_of(
            row);
      },
      py::kw_only(), py::arg("row"), py::arg("total"), py::arg("cu"));

  // Number of each sequence's first row block, the one behind the last one, and how many there are.
  m.def(
      "row_blocks",
      [](int block_m, int batch, int seqlen_q, int64_t total_q, OptionalInts const& cu_q) {
        flash::Seqlens seqlens{};
        seqlens.batch = batch;
        seqlens.seqlen_q = seqlen_q;
        seqlens.total_q = total_q;
        seqlens.cu_q = data(cu_q);
        flash::RowBlocks const blocks{block_m};
        std::vector<int64_t> first;
        for (int sequence = 0; sequence < batch + (cu_q ? 1 : 0); ++sequence) {
          first.push_back(blocks.first(seqlens, sequence, cu_q ? (*cu_q)[sequence] : 0));
        }
        return std::make_pair(first, blocks.count(seqlens));
      },
      py::kw_only(), py::arg("block_m"), py::arg("batch"), py::arg("seqlen_q") = 0,
      py::arg("total_q") = 0, py::arg("cu_q") = py::none());

  // Number of the sequence's first row block as a kernel finds it, and how many there are.
  m.def(
      "row_block",
      [](int sequence, int block_m, int batch, int64_t total_q, std::vector<int> const& cu_q) {
        flash::Seqlens seqlens{};
        seqlens.batch = batch;
        seqlens.total_q = total_q;
        seqlens.cu_q = cu_q.data();
        flash::RowBlocks const blocks{block_m};
        int64_t const row_q = BlockInfo(seqlens, sequence).row_q;
        return std::make_pair(blocks.first(seqlens, sequence, row_q), blocks.count(seqlens));
      },
      py::kw_only(), py::arg("sequence"), py::arg("block_m"), py::arg("batch"), py::arg("total_q"),
      py::arg("cu_q"));
}
