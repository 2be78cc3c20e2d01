// What the bindings of plans have in common: problems and machines from Python's words.
#pragma once

#include <string>

#include "bindings.h"
#include "plan/machines/h100.h"
#include "plan/machines/h200.h"
#include "plan/plan.h"

namespace plan_bindings {

template <class T>
T get(py::dict const& d, char const* name, T otherwise = {}) {
  return d.contains(name) ? d[name].cast<T>() : otherwise;
}

// The parts of a problem that calls with and without a cache say alike.
inline flash::plan::Problem problem_of(py::dict const& d, int seqlen_q, int right) {
  flash::plan::Problem p{};
  p.batch = get(d, "batch", 1);
  p.seqlen_q = get(d, "seqlen_q", seqlen_q);
  p.seqlen_k = get<int>(d, "seqlen_k");
  p.total_q = get(d, "total_q", int64_t(p.batch) * p.seqlen_q);
  p.total_k = get(d, "total_k", int64_t(p.batch) * p.seqlen_k);
  p.varlen_q = get<bool>(d, "packed");
  p.heads_q = get<int>(d, "heads_q");
  p.heads_kv = get<int>(d, "heads_kv");
  p.head_dim = get<int>(d, "head_dim");
  p.head_dim_v = get(d, "head_dim_v", p.head_dim);
  p.mask = {get(d, "left", -1), get(d, "right", right)};
  p.batch_invariant = get<bool>(d, "batch_invariant");
  p.page_size = get<int>(d, "page_size");
  p.page_boxes = p.page_size > 0 && p.page_size % 8 == 0;
  p.num_splits = get<int>(d, "num_splits");
  return p;
}

// "H200", "H100", or what differs of another GPU, whose kernels were not measured.
inline flash::plan::Machine machine_of(py::object const& machine) {
  if (py::isinstance<py::str>(machine)) {
    return machine.cast<std::string>() == "H100" ? flash::plan::kH100 : flash::plan::kH200;
  }
  auto const d = machine.cast<py::dict>();
  flash::plan::Machine m = flash::plan::kH200;
  m.sm = get(d, "sm", m.sm);
  m.sm_count = get(d, "sm_count", m.sm_count);
  m.l2_bytes = get(d, "l2_bytes", m.l2_bytes);
  m.memory = get(d, "memory", m.memory);
  m.reads = get(d, "reads", m.reads);
  return m;
}

}  // namespace plan_bindings
