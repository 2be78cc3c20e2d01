// The Python module: runs a variant of the table on the host.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "banks.h"
#include "host/select.h"
#include "host/variant.h"
#include "probabilities/launch.h"

namespace py = pybind11;

namespace {

template <class T>
T* pointer(py::dict const& call, char const* name) {
  return call.contains(name) ? reinterpret_cast<T*>(call[name].cast<uintptr_t>()) : nullptr;
}

template <class T>
T number(py::dict const& call, char const* name, T otherwise = {}) {
  return call.contains(name) ? call[name].cast<T>() : otherwise;
}

// name: (address, batch stride, row stride, head stride)
template <class T>
flash::TensorView<T> view(py::dict const& call, char const* name) {
  auto const v = call[name].cast<std::array<int64_t, 4>>();
  return {reinterpret_cast<T*>(v[0]), v[1], v[2], v[3]};
}

flash::FwdParams params(py::dict const& call) {
  flash::FwdParams p{};
  p.q = view<void const>(call, "q");
  p.k = view<void const>(call, "k");
  p.v = view<void const>(call, "v");
  p.out = view<void>(call, "out");
  auto const lse = call["lse"].cast<std::array<int64_t, 3>>();
  p.lse = {reinterpret_cast<float*>(lse[0]), lse[1], lse[2]};
  p.seqlens = {number<int>(call, "batch"),      number<int>(call, "seqlen_q"),
               number<int>(call, "seqlen_k"),   number<int64_t>(call, "total_q"),
               pointer<int>(call, "cu_q"),      pointer<int>(call, "cu_k"),
               pointer<int>(call, "used_k"),    pointer<int>(call, "leftpad_k"),
               number<int64_t>(call, "total_k")};
  p.mask = {number<int>(call, "left", -1), number<int>(call, "right", -1)};
  p.scores.softmax_scale = number<float>(call, "softmax_scale");
  p.scores.softcap = number<float>(call, "softcap");
  p.scores.alibi_slopes = pointer<float>(call, "alibi_slopes");
  p.scores.alibi_batch_stride = number<int64_t>(call, "alibi_batch_stride");
  p.scores.s_aux = pointer<float>(call, "s_aux");
  p.scores.dropout_p = number<float>(call, "dropout_p");
  p.scores.dropout_threshold = number<uint32_t>(call, "dropout_threshold");
  p.scores.rng_state = pointer<int64_t>(call, "rng_state");
  p.heads_q = number<int>(call, "heads_q");
  p.heads_kv = number<int>(call, "heads_kv");
  p.head_dim = number<int>(call, "head_dim");
  p.head_dim_v = number<int>(call, "head_dim_v");
  return p;
}

// Few SMs, so that persistent kernels have more than one tile.
flash::DeviceInfo const sm80{0, 80, 40 << 20, 166912, 4};
flash::DeviceInfo const sm90{0, 90, 50 << 20, 232448, 3};

void run(std::string const& name, py::dict const& call) {
  for (flash::Variant const& variant : flash::variants()) {
    if (name == variant.name) {
      flash::FwdParams const p = params(call);
      // Another for each call, but the same whenever it is repeated.
      simt::first_order = std::hash<std::string>{}(name) + p.seqlens.seqlen_q +
                          3 * p.seqlens.seqlen_k + p.mask.left;
      flash::DeviceInfo const& device = variant.arch == 90 ? sm90 : sm80;
      return variant.launch.forward(p, {device, nullptr, variant.name});
    }
  }
  throw py::value_error("no variant " + name);
}

void probabilities(std::string const& dtype, py::dict const& call) {
  flash::launch_probabilities(params(call), dtype.c_str(), pointer<void>(call, "s_dmask"),
                              {sm80, nullptr, "probabilities"});
}

// The name of the row that serves a forward call, and why each of the others does not.
py::tuple select_forward(std::string const& dtype, int head_dim, int head_dim_v, bool full_scores,
                         int sm, int smem_per_block, bool masked) {
  flash::Selection const selection = flash::explain(
      {"fwd", dtype.c_str(), head_dim, head_dim_v, full_scores, sm, smem_per_block, masked});
  py::dict rejected;
  for (flash::Rejection const& r : selection.rejected) {
    rejected[r.variant->name] = r.why;
  }
  return py::make_tuple(selection.variant ? selection.variant->name : "", rejected);
}

// {instruction: (passes of eight lanes, conflicts)} since it was asked last
py::dict bank_counts() {
  py::dict counts;
  for (auto const& [kind, c] : simt::bank_counts) {
    counts[kind.c_str()] = py::make_tuple(c.passes, c.conflicts);
  }
  simt::bank_counts.clear();
  return counts;
}

}  // namespace

PYBIND11_MODULE(flash_kernels, m) {
  m.def("run", &run, py::arg("name"), py::arg("call"));
  m.def("select", &select_forward, py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"),
        py::arg("full_scores"), py::arg("sm"), py::arg("smem_per_block"), py::arg("masked") = true);
  m.def("probabilities", &probabilities, py::arg("dtype"), py::arg("call"));
  m.def("bank_counts", &bank_counts);
}
