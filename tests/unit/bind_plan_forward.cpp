#include <array>
#include <span>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "plan/forward.h"
#include "plan/machines/h100.h"
#include "plan/machines/h200.h"

namespace {

using namespace flash::plan;
using flash::ForwardTile;

template <class T>
T get(py::dict const& d, char const* name, T otherwise = {}) {
  return d.contains(name) ? d[name].cast<T>() : otherwise;
}

Problem problem_of(py::dict const& d) {
  Problem p{};
  p.batch = get(d, "batch", 1);
  p.seqlen_q = get<int>(d, "seqlen_q");
  p.seqlen_k = get<int>(d, "seqlen_k");
  p.total_q = get(d, "total_q", int64_t(p.batch) * p.seqlen_q);
  p.total_k = get(d, "total_k", int64_t(p.batch) * p.seqlen_k);
  p.packed_q = p.packed_k = get<bool>(d, "packed");
  p.used_k = get<bool>(d, "used_k");
  p.heads_q = get<int>(d, "heads_q");
  p.heads_kv = get<int>(d, "heads_kv");
  p.head_dim = get<int>(d, "head_dim");
  p.head_dim_v = get(d, "head_dim_v", p.head_dim);
  p.mask = {get(d, "left", -1), get(d, "right", -1)};
  p.batch_invariant = get<bool>(d, "batch_invariant");
  p.page_size = get<int>(d, "page_size");
  p.keys = p.page_size == 0       ? KeyLayout::Rows
           : p.page_size % 8 == 0 ? KeyLayout::PageBoxes
                                  : KeyLayout::Pages;
  p.heads_apart = get(d, "heads_apart", true);
  p.whole_rows = get(d, "whole_rows", true);
  p.num_splits = get<int>(d, "num_splits");
  p.beside_decode = get<bool>(d, "beside_decode");
  return p;
}

// "H200", "H100", or the properties of another GPU, whose kernels were not measured.
Machine machine_of(py::object const& machine) {
  if (py::isinstance<py::str>(machine)) {
    return machine.cast<std::string>() == "H100" ? kH100 : kH200;
  }
  auto const d = machine.cast<py::dict>();
  Machine m = kH200;
  m.sm = get<int>(d, "sm");
  m.sm_count = get<int>(d, "sm_count");
  m.l2_bytes = get<int64_t>(d, "l2_bytes");
  m.memory = get<float>(d, "memory");
  m.forward = {};
  return m;
}

ForwardKernel kernel_of(py::dict const& d) {
  return {get<int>(d, "sm"),      get<int>(d, "head_dim"),   get<int>(d, "head_dim_v"),
          get<int>(d, "block_m"), get<int>(d, "block_n"),    get<int>(d, "second_block_n"),
          get(d, "plain", true),  get(d, "blocks_per_sm", 1)};
}

constexpr char const* kTiles[] = {"first", "second", "packed", "split"};

}  // namespace

void bind_plan_forward(py::module_& m) {
  // (tile, splits, heads side by side, µs, bytes of workspace)
  m.def(
      "plan_forward",
      [](py::dict const& problem, py::object const& machine, py::dict const& kernel) {
        auto const plan = plan_forward(problem_of(problem), machine_of(machine), kernel_of(kernel));
        ForwardChoice const& c = plan.choice;
        return std::tuple(kTiles[static_cast<int>(c.tile)], c.splits, c.side_by_side, plan.us,
                          plan.workspace);
      },
      py::arg("problem"), py::arg("machine"), py::arg("kernel"));

  m.def(
      "forward_us",
      [](py::dict const& problem, py::object const& machine, py::dict const& kernel, int tile,
         int splits, int side_by_side) {
        return forward_us(problem_of(problem), machine_of(machine), kernel_of(kernel),
                          {ForwardTile(tile), splits, side_by_side});
      },
      py::arg("problem"), py::arg("machine"), py::arg("kernel"), py::kw_only(), py::arg("tile"),
      py::arg("splits") = 1, py::arg("side_by_side"));

  m.def("forward_is_possible", [](py::dict const& problem, py::dict const& kernel, int tile) {
    return is_possible(problem_of(problem), kernel_of(kernel), ForwardTile(tile));
  });

  // [(tile, splits, heads side by side)]
  m.def("forward_choices",
        [](py::dict const& problem, py::object const& machine, py::dict const& kernel) {
          std::array<ForwardChoice, kMostForwardChoices> all;
          int const count = forward_choices(problem_of(problem), machine_of(machine),
                                            kernel_of(kernel), all.data());
          std::vector<std::tuple<char const*, int, int>> choices;
          for (ForwardChoice const& c : std::span(all.data(), count)) {
            choices.emplace_back(kTiles[static_cast<int>(c.tile)], c.splits, c.side_by_side);
          }
          return choices;
        });
}
