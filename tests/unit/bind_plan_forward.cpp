#include <tuple>
#include <vector>

#include "plan_bindings.h"

namespace plan_forward_binding {

using namespace flash::plan;
using namespace plan_bindings;
using flash::ForwardTile;

Problem problem_of(py::dict const& d) {
  Problem p = plan_bindings::problem_of(d, /*seqlen_q=*/0, /*right=*/-1);
  p.varlen_k = p.varlen_q;
  p.used_k = get<bool>(d, "used_k");
  p.heads_apart = get(d, "heads_apart", true);
  p.whole_rows = get(d, "whole_rows", true);
  p.beside_decode = get<bool>(d, "beside_decode");
  return p;
}

// The kernels of an H100 and an H200 were measured.
Machine measured_machine(py::object const& machine) {
  Machine m = plan_bindings::machine_of(machine);
  if (!py::isinstance<py::str>(machine)) {
    m.forward = {};
  }
  return m;
}

Kernel kernel_of(py::dict const& d, Machine const& m) {
  return {get<int>(d, "sm"),
          get<int>(d, "head_dim"),
          get<int>(d, "head_dim_v"),
          get<int>(d, "block_m"),
          get<int>(d, "block_n"),
          get(d, "plain", true),
          get(d, "blocks_per_sm", 1) * m.sm_count,
          get<int>(d, "second_block_n")};
}

constexpr char const* kTiles[] = {"first", "second", "packed", "split"};

}  // namespace plan_forward_binding

void bind_plan_forward(py::module_& m) {
  using namespace plan_forward_binding;
  // (tile, splits, heads side by side, µs)
  m.def(
      "plan_forward",
      [](py::dict const& problem, py::object const& machine, py::dict const& kernel) {
        Machine const m = measured_machine(machine);
        ForwardPlan const plan = plan_forward(problem_of(problem), m, kernel_of(kernel, m));
        ForwardChoice const& c = plan.choice;
        return std::tuple(kTiles[static_cast<int>(c.tile)], c.splits, c.side_by_side, plan.us);
      },
      py::arg("problem"), py::arg("machine"), py::arg("kernel"));

  m.def(
      "predicted_us",
      [](py::dict const& problem, py::object const& machine, py::dict const& kernel, int tile,
         int splits, int side_by_side) {
        Machine const m = measured_machine(machine);
        return predicted_us(problem_of(problem), m, kernel_of(kernel, m),
                            {ForwardTile(tile), splits, side_by_side});
      },
      py::arg("problem"), py::arg("machine"), py::arg("kernel"), py::kw_only(), py::arg("tile"),
      py::arg("splits") = 1, py::arg("side_by_side"));

  // [(tile, splits, heads side by side)]
  m.def("forward_choices", [](py::dict const& problem, py::object const& machine,
                              py::dict const& kernel) {
    std::vector<std::tuple<char const*, int, int>> choices;
    Machine const m = machine_of(machine);
    for (auto const& [c, us] : forward_choices(problem_of(problem), m, kernel_of(kernel, m))) {
      choices.emplace_back(kTiles[static_cast<int>(c.tile)], c.splits, c.side_by_side);
    }
    return choices;
  });
}
