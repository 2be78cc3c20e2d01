#include "params/seqlens.h"
#include "plan/cost.h"
#include "plan_bindings.h"

namespace plan_decode_binding {

using namespace flash::plan;

using namespace plan_bindings;

// Against a cache, unless it is packed.
Problem problem_of(py::dict const& d) {
  Problem p = plan_bindings::problem_of(d, /*seqlen_q=*/1, /*right=*/0);
  p.used_k = get(d, "used_k", true);
  p.dropout = get<bool>(d, "dropout");
  p.cached = !p.varlen_q && get(d, "cached", true);
  p.odd_rows = get<bool>(d, "odd_rows");
  return p;
}

// Rows of csrc/variants.py, on a GPU where so many thread blocks fit a multiprocessor.
Kernel kernel_of(int head_dim, int resident, bool clusters) {
  if (head_dim <= 64) {
    return {80, 64, 64, 16, 128, true, resident, 0, 8, clusters};
  }
  if (head_dim <= 128) {
    return {80, 128, 128, 16, 64, true, resident, 0, 4, clusters};
  }
  return {80, 256, 256, 16, 32, true, resident, 0, 1, false};
}

py::dict plan(py::dict const& problem, py::object const& machine, int blocks_per_sm,
              double forward_us) {
  Problem const p = problem_of(problem);
  Machine const m = machine_of(machine);
  DecodePlan const plan =
      plan_decode(p, m, kernel_of(p.head_dim, blocks_per_sm * m.sm_count, m.sm == 90), forward_us);
  py::dict d;
  d["few_q"] = plan.few_q;
  d["us"] = plan.us;
  d["slices"] = plan.cut.slices;
  d["extra"] = plan.cut.extra;
  d["max_pieces"] = plan.cut.max_pieces;
  d["min_units"] = plan.cut.min_units;
  d["cluster_log2"] = plan.cut.cluster_log2;
  return d;
}

}  // namespace plan_decode_binding

void bind_plan_decode(py::module_& m) {
  m.attr("ALL_QUERIES") = flash::kAllQueries;
  m.def("plan_decode", &plan_decode_binding::plan, py::arg("problem"), py::arg("machine"),
        py::arg("blocks_per_sm") = 3, py::arg("forward_us") = 1e9);
  // (keys of an average sequence, weight)
  m.def("fills", [](py::dict const& problem) {
    using namespace flash::plan;
    std::vector<std::pair<double, double>> fills;
    Problem const p = plan_decode_binding::problem_of(problem);
    for (auto const& [filled, weight] : fills_of(p)) {
      fills.emplace_back(filled.mean_k(), weight);
    }
    return fills;
  });
}
