// A call as Python describes it (calls.py), as parameters of kernels.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "params/bwd_params.h"
#include "params/fwd_params.h"

namespace py = pybind11;

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

// name: (address, batch stride, head stride)
inline flash::RowView rows(py::dict const& call, char const* name) {
  if (!call.contains(name)) {
    return {};
  }
  auto const v = call[name].cast<std::array<int64_t, 3>>();
  return {reinterpret_cast<float*>(v[0]), v[1], v[2]};
}

inline flash::Seqlens seqlens(py::dict const& call) {
  flash::Seqlens s{};
  s.batch = number<int>(call, "batch");
  s.seqlen_q = number<int>(call, "seqlen_q");
  s.seqlen_k = number<int>(call, "seqlen_k");
  s.total_q = number<int64_t>(call, "total_q");
  s.total_k = number<int64_t>(call, "total_k");
  s.cu_q = pointer<int>(call, "cu_q");
  s.cu_k = pointer<int>(call, "cu_k");
  s.used_k = pointer<int>(call, "used_k");
  s.leftpad_k = pointer<int>(call, "leftpad_k");
  s.in_pages = call.contains("block_table");
  s.new_k = number<int>(call, "new_k");
  s.batch_k = pointer<int>(call, "batch_k");
  s.batches_k = number<int>(call, "batches_k");
  s.few_q = number<int>(call, "few_q");
  s.few_q = s.few_q < 0 ? flash::kAllQueries : s.few_q;
  return s;
}

// What both directions have.
template <class Params>
Params params(py::dict const& call) {
  Params p{};
  p.q = view<void const>(call, "q");
  p.k = view<void const>(call, "k");
  p.v = view<void const>(call, "v");
  p.lse = rows(call, "lse");
  p.seqlens = seqlens(call);
  p.mask = {number<int>(call, "left", -1), number<int>(call, "right", -1)};
  p.scores.softmax_scale = number<float>(call, "softmax_scale");
  p.scores.softcap = number<float>(call, "softcap");
  p.scores.alibi_slopes = pointer<float>(call, "alibi_slopes");
  p.scores.alibi_batch_stride = number<int64_t>(call, "alibi_batch_stride");
  p.scores.alibi_head_stride = number<int64_t>(call, "alibi_head_stride");
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

// name: (address, batch stride, row stride, head stride, whether of rows), if given
inline flash::Descale code_descale(py::dict const& call, std::string const& name) {
  flash::Descale scale{};
  scale.all = number<float>(call, (name + "_all").c_str(), 1.f);
  if (call.contains(name.c_str())) {
    auto const v = call[name.c_str()].cast<std::array<int64_t, 5>>();
    scale = {reinterpret_cast<float*>(v[0]), v[1], v[2], v[3], v[4] != 0, scale.all};
  }
  return scale;
}

inline flash::CodeDescales code_descales(py::dict const& call) {
  return {number<bool>(call, "codes"),     number<bool>(call, "codes_of_q"),
          number<bool>(call, "bf16_out"),  code_descale(call, "q_descale"),
          code_descale(call, "k_descale"), code_descale(call, "v_descale")};
}

inline flash::FwdParams forward_params(py::dict const& call) {
  auto p = params<flash::FwdParams>(call);
  p.batch_invariant = number<bool>(call, "batch_invariant");
  p.out = view<void>(call, "out");
  p.pages = {pointer<int>(call, "block_table"), number<int64_t>(call, "table_stride"),
             number<int>(call, "per_sequence"), flash::FastDiv(number<int>(call, "page_size", 1)),
             number<int>(call, "pages")};
  p.codes = code_descales(call);
  p.odd = {number<int>(call, "odd_columns_k"), number<int>(call, "odd_columns_v")};
  if (auto* const logits = pointer<float>(call, "max_logits")) {
    p.max_logits = call.contains("logits_of_heads") ? flash::MaxLogits{0, logits}
                                                    : flash::MaxLogits{logits - p.lse.ptr};
  }
  return p;
}
